"""Memory that two replicas need for sums of gradients, against what their plans say."""

import gc
import itertools
import os
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tests.helpers.mpi import mpi_run
from tests.zoo.message_memory import MessageMemory
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.mpi]

BATCH, IDS, WIDTH, DEPTH = 8, 256, 256, 4
# Options, and the most bytes of a bucket: all gradients in one, or each alone.
WAYS: list[tuple[dict[str, Any], str]] = [
    ({}, "32MiB"),
    ({"shard_optimizer": True, "gradient_dtype": "bfloat16"}, "128KiB"),
]


def model() -> keras.Model:
    """A table whose gradient is rows, and kernels of 512 KiB."""
    steps = [layers.Embedding(1000, WIDTH), layers.GlobalAveragePooling1D()]
    for _ in range(DEPTH // 2):
        steps.append(layers.Dense(2 * WIDTH, activation="tanh", use_bias=False))
        steps.append(layers.Dense(WIDTH, use_bias=False))
    return chain((IDS,), *steps, dtype="int32")


def held_bytes() -> list[list[int]]:
    """Trains in each way; returns the bytes that are planned, and the most that sums had."""
    x = np.arange(BATCH * IDS).reshape(BATCH, IDS) % 1000
    found = []
    for options, threshold in WAYS:
        os.environ["TNT_FUSION_THRESHOLD"] = threshold
        piped = tnt.PipelineModel(
            model(), num_stages=1, num_micro_batches=2, num_replicas=2, batch_size=BATCH, **options
        )
        piped.compile("sgd", "mse")
        for _ in range(2):
            piped.train_on_batch(x, np.ones((BATCH, WIDTH), "float32"))
        gc.collect()
        memory = MessageMemory()
        for _ in range(2):
            piped.train_on_batch(x, np.ones((BATCH, WIDTH), "float32"))
        table = piped._engine.weights.table
        arrived = [v for v in piped.trainable_variables if not table.trains(v)]
        values = sum(v.numpy().nbytes for v in arrived)  # which are weights, planned as such
        found.append([piped.plan.stages[0].reduction_bytes, memory.most - values])
    return found


@pytest.mark.slow
def test_never_more_than_planned() -> None:
    run = mpi_run(2, held_bytes, env={"TNT_TIMEOUT": "30"}, timeout=240).check()
    for planned, held in itertools.chain(*run.results):
        assert planned / 4 <= held <= planned
