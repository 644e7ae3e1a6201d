"""Stages x replicas: the numbers of one process with batches of any size, clipped and weighted.

Usually some trainings with three replicas of one stage. All, of all shapes, up to twelve ranks:

    TNT_TEST_EXAMPLES=1 pytest tests/face/numbers/test_replica_grid.py
"""

from __future__ import annotations

import itertools
import json

import keras
import pytest

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers.draws import more_asked_for
from tests.helpers.mpi import mpi_run
from tests.helpers.training import WEIGHTS, X, Y, distance, use_float64
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.slow]

ROUNDING, BITS = 1e-10, 1e-13
ALL = [(r, s) for r, s in itertools.product((1, 2, 3, 4), (1, 2, 3)) if r * s > 1]
SHAPES = ALL if more_asked_for() else [(3, 1)]

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.05),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.1),
    "nadam": lambda: keras.optimizers.Nadam(1e-2, gradient_accumulation_steps=2),
}
ALL_TRAININGS = [  # optimizer, samples of a batch, micro-batches of a replica, schedule, weighted
    ("sgd", 8, 2, "1f1b", True),
    ("sgd", 2, 1, "gpipe", False),
    ("adamw", 7, 2, "zb-h1", True),
    ("adamw", 1, 2, "1f1b", False),
    ("nadam", 11, 3, "gpipe", False),
    ("nadam", 22, 1, "zb-h1", True),
]
TRAININGS = ALL_TRAININGS if more_asked_for() else [ALL_TRAININGS[i] for i in (0, 3, 4)]


def trained(training, **shape):
    """What one kind of training leaves behind: in plain Keras, or as a pipeline of a shape."""
    optimizer, batch, micro_batches, schedule, weighted = training
    keras.utils.set_random_seed(1)
    model = mlp()
    if shape:
        several = shape["num_stages"] > 1
        shape["num_micro_batches"] = micro_batches * shape.pop("times", 1)
        model = PipelineModel(model, schedule=schedule if several else None, **shape)
    model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"], run_eagerly=not shape)
    weights = WEIGHTS if weighted else None
    options = {"batch_size": batch, "epochs": 2, "shuffle": False, "verbose": 0}
    told = model.fit(X, Y, sample_weight=weights, **options)
    return {"logs": told.history, "weights": [w.tolist() for w in model.get_weights()]}


def train_all(replicas, stages):
    """Trains in all ways on this rank."""
    use_float64()
    shape = {"num_stages": stages, "num_replicas": replicas}
    assert world().size == replicas * stages
    return [json.loads(json.dumps(trained(training, **shape))) for training in TRAININGS]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("replicas", "stages"), SHAPES)
def test_the_numbers_of_one_process(replicas, stages):
    run = mpi_run(replicas * stages, train_all, replicas, stages, timeout=400).check()
    for i, training in enumerate(TRAININGS):
        first = run.results[0][i]
        assert all(result[i] == first for result in run.results), training
        assert distance(trained(training), first) < ROUNDING, training
        pipeline = trained(training, num_stages=stages, times=replicas)
        assert distance(pipeline, first) < BITS, training
