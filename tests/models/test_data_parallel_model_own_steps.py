"""Models with steps of their own train on several ranks to the numbers of plain Keras."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tarantella_pp.cli.main import main
from tarantella_pp.errors import ConfigurationError, ReplicaError, TarantellaError
from tests.face.files.test_checkpoints import At, stop
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.own_steps import CASES, Regression, X, Y, numbers_of
from tests.helpers.training import begun, distance, use_float64

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]


ALONE = [case for case in CASES if case != "adversaries"]  # which write checkpoints


class Normalized(Regression):
    """Its first layer takes statistics of the data, which are exact; draws random numbers.

    After each update it averages these statistics once more, as a mean teacher does.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3, seed=1)
        self.averaged = self.add_weight((X.shape[1],), "zeros", trainable=False, name="averaged")

    def call(self, x, training=False):
        return super().call(self.drop(self.norm(x, training=training), training=training))

    def fit(self, pair, **options):
        return super().fit(*pair, **options)

    def train_step(self, data):
        logs = super().train_step(data)
        self.averaged.assign(0.9 * self.averaged + 0.1 * self.norm.moving_mean)
        return logs


class Late(Normalized):
    def loss_of(self, x, y):
        loss, predicted = super().loss_of(x, y)
        return loss + keras.ops.sum(self.norm.moving_mean), predicted


@tf.function
def repeated(predicted, y, times):
    """A loop that AutoGraph makes, with a condition in it."""
    loss = tf.zeros((), predicted.dtype)
    for i in tf.range(times):
        if i > 0:
            loss += tf.reduce_mean(tf.square(tf.cast(i, y.dtype) * predicted - y))
        else:
            loss += tf.reduce_mean(tf.abs(predicted - y))
    return loss


class Branches(Regression):
    """Conditions and loops, functions with other names on each rank; noise that is no sample's."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight((), "zeros", name="seen", trainable=False)
        self.seeds = keras.random.SeedGenerator(2)

    def loss_of(self, x, y):
        noise = keras.random.normal((3,), dtype="float64", seed=self.seeds)
        predicted = self(x, training=True) * noise
        loss = tf.reduce_mean(tf.square(predicted - y))
        steps = tf.cast(self.optimizer.iterations, "int32")
        _, halved = tf.while_loop(lambda i, _: i < steps, lambda i, h: (i + 1, h / 2), [0, loss])

        def later():
            return tf.cond(steps < 4, lambda: halved, lambda: repeated(predicted, y, 3))

        return tf.cond(steps < 2, lambda: loss, later), predicted

    def train_step(self, data):
        rows = tf.cast(tf.shape(data[0])[0], "float64")

        def count(i):
            self.seen.assign_add(rows)
            return (i + 1,)

        tf.while_loop(lambda i: i < 3, count, [0])
        return super().train_step(data)


def branching(wrap=None):
    model = begun(Branches, wrap, keras.optimizers.SGD(0.01), seed=5)
    looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.get_weights())
    callbacks = [tnt.callbacks.OnOneRank(looks)]
    model.fit(X[:16], Y[:16], 8, 3, shuffle=False, verbose=0, callbacks=callbacks)
    return [weight.tolist() for weight in model.get_weights()]


def normalized(wrap=None):
    model = begun(Normalized, wrap, keras.optimizers.SGD(0.01), seed=4)
    model.fit(pair=(X, Y), batch_size=8, shuffle=False, verbose=0)
    averages = [model.norm.moving_mean, model.norm.moving_variance, model.averaged]
    return [np.array(v).tolist() for v in averages], model


def adversaries(*callbacks, wrap=None):
    """The steps of a `fit` of uneven batches; what it and one more, without callbacks, give."""
    build, optimizers, x = CASES["adversaries"]
    model = begun(build, wrap, *optimizers(), seed=3)
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate)
    options = {"epochs": 2, "validation_split": 0.2, "verbose": 0, "batch_size": 7}
    first = model.fit(x, Y, callbacks=[*callbacks, count, slower], **options)
    again = model.fit(x, Y, **options).history
    weights = [weight.tolist() for weight in model.get_weights()]
    return steps, [first.epoch, first.history, again, weights]


def checkpointed(folder):
    """A calm run; one that stops in its second epoch, goes on, and has nothing left to train."""
    own = lambda: tnt.callbacks.Checkpoint(f"{folder}/run", every=2)  # noqa: E731
    runs = (), (own(), At(4, stop)), (own(),), (own(),)
    return [adversaries(*callbacks, wrap=tnt.Model) for callbacks in runs]


def refused(wrap, folder):
    """Refused before the first update, on all ranks, which go on."""
    late, unbuilt = wrap(Late()), wrap(Regression())
    for model in (late, unbuilt):
        model.compile("sgd")
    late(X[:1])
    before = late.get_weights()
    runs = (
        lambda: late.fit((X, Y), verbose=0),
        lambda: late.fit((X, Y), verbose=0, callbacks=keras.callbacks.BackupAndRestore("b")),
        lambda: unbuilt.fit(X, Y, verbose=0, callbacks=tnt.callbacks.Checkpoint(f"{folder}/c")),
    )
    found = list(map(error_of, runs))
    assert all(map(np.array_equal, before, late.get_weights()))
    return found


def train(folder):
    use_float64()
    plain = Normalized()
    assert isinstance(tnt.Model(plain), Normalized)
    assert type(plain) is Normalized  # the user's model stays what it was
    found = {}
    for case in ALONE:
        found[case] = numbers_of(case, tnt.Model, seed=3 + tnt.get_rank())
    with warnings.catch_warnings(record=True) as told:
        found["averages"], model = normalized(tnt.Model)
    of_norms = [each for each in told if "BatchNormalization layers" in str(each.message)]
    assert len(of_norms) == tnt.get_rank()
    found["seeds"] = np.array(model.drop.seed_generator.state).tolist()
    found["branches"] = branching(tnt.Model)
    found["refused"] = refused(tnt.Model, folder)
    kernel = model.trainable_variables[0]
    value = kernel.numpy()
    kernel.assign(value + tnt.get_rank())
    for save in (model.save, model.save_weights):
        with pytest.raises(ReplicaError, match=r"kernel.* not the same on all ranks"):
            save(f"{folder}/never.weights.h5")
    kernel.assign(value)
    found["checkpointed"] = checkpointed(folder)
    model.save(f"{folder}/m.keras")
    model.save_weights(f"{folder}/m.weights.h5")
    before = model.get_weights()
    model.set_weights([0 * weight for weight in before])
    model.load_weights(f"{folder}/m.weights.h5")
    assert all(map(np.array_equal, before, model.get_weights()))
    model.fit(None if tnt.get_rank() else (X, Y), batch_size=8, verbose=0)
    found["weights"] = [w.tolist() for w in model.get_weights()]
    return found


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks_train_as_one_process(tmp_path, capsys):
    results = mpi_run(2, train, str(tmp_path), timeout=300).check().results
    for result in results:  # the rank that has tried says it in other words
        late, backup, unbuilt = result.pop("refused")
        assert re.search("Late.train_step reads '.*moving_mean' in the forward pass", late)
        assert "Use tnt.callbacks.Checkpoint, with which `fit` goes on" in backup
        assert re.search(r"Received: regression\w*/dense\w*/kernel, ", unbuilt)
        steps, (calm, _, *continued) = zip(*result["checkpointed"], strict=True)
        assert list(steps) == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0], [1, 2], []]
        assert continued == [calm, calm]
    assert all(result == results[0] for result in results)
    first = results[0]
    assert distance(adversaries()[1], first["checkpointed"][0][1]) < 1e-10
    for case in ALONE:
        assert distance(numbers_of(case), first[case]) < 1e-10, case
    assert distance(normalized()[0], first["averages"]) < 1e-10
    assert distance(branching(), first["branches"]) < 1e-10
    assert first["seeds"][1] == 3 * len(results)
    assert main(["checkpoint", "convert", f"{tmp_path}/run", f"{tmp_path}/c.keras"]) == 2
    assert "steps of its own, which is not converted" in capsys.readouterr().err
    again = keras.saving.load_model(tmp_path / "m.keras", {"Normalized": Normalized})
    assert type(again) is Normalized


def test_one_process_trains_the_model_itself_and_plans_nothing():
    model = Regression()
    for same in (tnt.Model(model), tnt.Model(model=model), tnt.Sequential(layers=model)):
        assert same is model
    for options in ({"num_micro_batches": 2}, {"shard_optimizer": True}):
        with pytest.raises(ConfigurationError, match=f"Received: .*{next(iter(options))}"):
            tnt.Model(Regression(), **options)
    with pytest.raises(TarantellaError, match=r"overrides train_step, .* tnt\.Model"):
        tnt.PipelineModel(Regression(), num_stages=2)
