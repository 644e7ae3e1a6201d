"""Replicas of a pipeline: the numbers of one process, each batch and its gradients shared."""

import functools
import re

import keras
import numpy as np
import pytest

import tarantella_pp as tnt
from tarantella_pp.errors import ReplicaError
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers import training
from tests.helpers.files import error_of
from tests.helpers.mpi import PYTHONS, mpi_run
from tests.helpers.training import BATCH, CASES, ROUNDING, X, Y, adamw, compiled, distance, fitted
from tests.zoo.models import perceptron

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.usefixtures("untried")]


SHARDED = CASES["regularized, evenly"], CASES["looked_up_again, evenly"]
"""Weights of all sizes, whose norm is one sum; a table that is looked up in both stages."""


def begun(case, **options):
    keras.utils.set_random_seed(1)
    model = tnt.PipelineModel(case.build(), 2, **options) if options else case.build()
    averaging = keras.optimizers.Adam(0.01, global_clipnorm=0.05, use_ema=True, ema_momentum=0.7)
    how = case.compiled() | {"optimizer": averaging, "run_eagerly": not options}
    return compiled(model, **how)


def train_sharded(folder):
    training.use_float64()
    return [with_and_without_sharding(case, folder) for case in SHARDED]


def with_and_without_sharding(case, folder):
    """Trains, saves, and goes on; on this rank."""
    outcomes, slots = [], []
    for sharded in (False, True):
        model = begun(case, num_micro_batches=2, shard_optimizer=sharded)
        first = fitted(model, training.data_of_rank(case))
        path = f"{folder}/{sharded}.weights.h5"
        model.save_weights(path)
        model.load_weights(path)
        outcomes.append([first, fitted(model, training.data_of_rank(case))])
        slots.append(sum(len(v.shape) > 0 for v in model.optimizer.variables))
    return outcomes, slots


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_sharded_optimizers_give_the_same_bits(tmp_path, python):
    run = mpi_run(4, train_sharded, str(tmp_path), timeout=400, python=python).check()
    for case, *results in zip(SHARDED, *run.results, strict=True):
        (whole, sharded), _ = results[0]
        for a, b in zip(whole, sharded, strict=True):
            assert a["weights"] == b["weights"]
            assert distance(a, b) < training.BITS  # penalties of a loss are added otherwise
        assert distance(fitted(begun(case), case), whole[0]) < ROUNDING
        slots = [own for _, own in results]
        assert sum(b for _, b in slots) == sum(a for a, _ in slots) // 2  # two have each stage


def be_refused_and_train():
    """Small batches, metrics that look at all samples, and what is refused, on this rank."""
    training.use_float64()
    found = {}
    model = tnt.Model(perceptron(), num_micro_batches=2)
    found["small"] = trained_in_small_batches(model)
    found["differ"] = differ()
    found["constraint"] = [constrained(num_stages=2), constrained(shard_optimizer=True)]
    found["constraint"].append(constrained(of=noisy(), num_stages=2))
    found["written"] = [written_on_one_rank(n, r) for n, r in ((1, 1), (2, 0), (2, 1))]
    found["written"] += written_later()
    found["coupled"] = coupled(tnt.PipelineModel(perceptron(), num_stages=1, num_micro_batches=2))
    found["rounded"] = trained_rounded()
    return found


def trained_in_small_batches(model):
    """Of three samples, and a last one of one."""
    keras.utils.set_random_seed(3)
    model.compile(adamw(), "mse", metrics=["mae", squared_total])
    model.set_weights([np.full_like(w, 0.1) for w in model.get_weights()])
    return model.fit(
        X[:7], Y[:7], batch_size=3, shuffle=False, verbose=0, validation_data=(X[:4], Y[:4])
    ).history


def trained_once(model):
    """Of batches of one size."""
    model.compile(adamw(), "mse")
    model.fit(X[:16], Y[:16], batch_size=BATCH, shuffle=False, verbose=0)
    return [w.tolist() for w in model.get_weights()]


def trained_rounded():
    """Weights after training with gradients that are sent rounded, also to owners of weights."""
    found = []
    for sharded in (False, True):
        keras.utils.set_random_seed(1)
        options = {"gradient_dtype": "bfloat16", "shard_optimizer": sharded}
        model = tnt.Model(perceptron(), num_micro_batches=2, **options)
        found.append(trained_once(model))
    return found


def differ():
    """What is said once a weight of one replica has been changed."""
    model = tnt.PipelineModel(perceptron(), num_stages=1, check_replicas=2)
    model.compile(adamw(), "mse")
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)  # compared after the second step
    weight = model.trainable_variables[1]
    weight.assign(weight + world().rank)
    return error_of(lambda: model.fit(X[:16], Y[:16], batch_size=8, verbose=0))


def noisy():
    """A constraint that draws."""
    seed = keras.random.SeedGenerator(1)
    return lambda w: w + keras.random.normal(w.shape, seed=seed, dtype=w.dtype)


def constrained(num_stages=1, of=None, **options):
    """What is said of a constraint that reads, or writes, what another rank trains or writes."""
    model = perceptron()
    weights = [weight for weight in model.trainable_variables if len(weight.shape) == 2]
    for weight in weights:
        weight.constraint = of or (lambda w: w * sum(map(keras.ops.mean, weights)))
    model = compiled(tnt.PipelineModel(model, num_stages, **options), adamw(), "mse")
    return error_of(lambda: model.train_on_batch(X, Y))


def writing_on(rank, num_stages):
    """A pipeline, what has one rank write a weight, and a callback that does so."""
    model = compiled(tnt.PipelineModel(perceptron(), num_stages=num_stages), adamw(), "mse")

    def write(*_):
        if world().rank == rank:
            model.trainable_variables[0].assign(np.ones(model.trainable_variables[0].shape))

    return model, write, [keras.callbacks.LambdaCallback(on_epoch_end=write)]


def written_on_one_rank(num_stages, rank):
    """What `fit` says of a weight that one rank alone has written, perhaps not its own."""
    model, write, writing = writing_on(rank, num_stages)
    if num_stages > 1:
        write()
    said = error_of(lambda: model.fit(X[:8], Y[:8], batch_size=8, verbose=0, callbacks=writing))
    with pytest.raises(ReplicaError):
        model.save_weights("never.weights.h5")
    return said


def written_later():
    """What calls say of a weight of rank 0 that rank 1 writes after a step."""
    model, _, writing = writing_on(1, num_stages=2)
    fit = functools.partial(model.fit, epochs=2, verbose=0, callbacks=writing)
    calls = fit, model.train_on_batch, model.evaluate, lambda *_: model.get_weights()
    return [error_of(lambda call=call: call(X[:8], Y[:8])) for call in calls]


def squared_total(y_true, y_pred):
    """No sum over samples: it needs all outputs."""
    return keras.ops.mean(y_pred) ** 2


def largest(y_true, y_pred):
    return keras.ops.max(keras.ops.abs(y_true - y_pred)) + keras.ops.mean((y_true - y_pred) ** 2)


def coupled(model):
    model.compile(adamw(), largest)
    model.set_weights([np.full_like(w, 0.1) for w in model.get_weights()])
    return model.fit(X[:16], Y[:16], batch_size=BATCH, shuffle=False, verbose=0, epochs=2).history


@pytest.mark.slow
def test_small_batches_and_what_needs_all_samples():
    first, second = mpi_run(2, be_refused_and_train, timeout=240).check().results
    assert first == second
    assert distance(trained_in_small_batches(perceptron()), first["small"]) < ROUNDING
    assert distance(coupled(perceptron()), first["coupled"]) < ROUNDING
    assert "ReplicaError" in first["differ"]
    assert all(f"on rank {rank}" in first["differ"] for rank in (0, 1))
    assert "bias' is not the same" in first["differ"]
    assert "1 of " in first["differ"]
    for said in first["constraint"]:
        assert re.search("UnsupportedModelError: .*constraint of 'dense", said)
    for said in first["written"]:
        assert re.search("ReplicaError: .*/kernel' is not the same on all ranks", said)
    rounded, sharded = first["rounded"]
    keras.utils.set_random_seed(1)
    assert 1e-6 < distance(trained_once(perceptron()), rounded, "weights") < 0.1
    assert rounded == sharded
    given = {"num_micro_batches": 2, "num_replicas": 2}
    exact, plan = (
        tnt.make_plan(perceptron(), 1, **given, gradient_dtype=dtype)
        for dtype in (None, "bfloat16")
    )
    assert 4 * sum(plan.stages[0].bucket_bytes) == sum(exact.stages[0].bucket_bytes)  # of float64
    assert "sent as bfloat16" in " ".join(str(plan).split())
