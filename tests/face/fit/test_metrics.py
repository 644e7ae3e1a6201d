"""Metrics of all kinds log, and hold, what they do in plain Keras, on every rank."""

import functools
import re

import keras
import numpy as np
import pytest
from keras import layers, ops

from tarantella_pp.errors import StaleWeightError, UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.batch_step import BatchStep
from tests.helpers import training
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import BATCH, LABELS, ROUNDING, Case, X, distance, lists_of, make, sgd
from tests.zoo.models import chain, perceptron

pytestmark = pytest.mark.keras

ONE_HOT = np.eye(3)[LABELS]


def classifier():
    return keras.Sequential([perceptron(), layers.Softmax()])


def largest_error(y, p):
    """Couples the samples of a batch."""
    return ops.max(ops.abs(y - p)) * ops.ones_like(p[:, 0])


def share_of_first(y, p):
    """A number for the whole batch, of which Keras takes the mean over batches."""
    return ops.mean(ops.cast(ops.argmax(p, axis=-1) == 0, p.dtype))


class Extremes(keras.metrics.Metric):
    """Its result is a dict, with an array in it."""

    def __init__(self, name="extremes"):
        super().__init__(name=name)
        self.most = self.add_weight(shape=(3,), initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(ops.abs(y - p), axis=0)))

    def result(self):
        return {"worst": ops.max(self.most), "each": self.most + 0.0}


ADDITIVE = [lambda: "accuracy", lambda: keras.metrics.AUC(name="auc")]
OF_THE_WHOLE_BATCH = [lambda: largest_error, lambda: share_of_first]


def case(kinds, build=classifier):
    return Case(
        build,
        X,
        ONE_HOT,
        lambda: {
            "loss": "categorical_crossentropy",
            "optimizer": sgd(),
            "metrics": [kind() for kind in kinds],
            "weighted_metrics": ["mae"],
        },
    )


def used(model):
    """What a model logs and returns, and what its metrics hold in the end."""
    quiet = {"batch_size": BATCH, "verbose": 0, **training.WEIGHTED}
    validation = (X[:8], ONE_HOT[:8])
    told = model.fit(X, ONE_HOT, epochs=2, shuffle=False, validation_data=validation, **quiet)
    listed = model.evaluate(X, ONE_HOT, **quiet)
    named = model.evaluate(X, ONE_HOT, return_dict=True, **quiet)
    results = [lists_of(metric.result()) for metric in model.metrics]
    model.reset_metrics()
    batch = model.train_on_batch(X[:7], ONE_HOT[:7], return_dict=True)
    after = [lists_of(metric.result()) for metric in model.metrics]
    kinds = {
        name: [type(value).__name__, str(getattr(value, "dtype", ""))]
        for name, (value, *_) in told.history.items()
    }
    numbers = [told.history, listed, named, results, batch, after]
    return {"kinds": kinds, "numbers": lists_of(numbers)}


def test_metrics_of_a_subclassed_model_are_in_the_logs():
    kept = case([], watching)
    in_one, pipeline = used(make(kept)), used(make(kept, num_stages=1, num_micro_batches=3))
    assert in_one["kinds"] == pipeline["kinds"]
    assert distance(in_one["numbers"], pipeline["numbers"]) < ROUNDING


def test_outputs_are_let_go_unless_a_metric_needs_them_at_once(monkeypatch):
    kept = []
    logs = BatchStep.logs

    def looked(self, elsewhere):
        kept.append([len(part) for part in self.results])
        return logs(self, elsewhere)

    monkeypatch.setattr(BatchStep, "logs", looked)
    for kinds in (ADDITIVE, OF_THE_WHOLE_BATCH):
        model = make(case(kinds), num_stages=1, num_micro_batches=2)
        model.train_on_batch(X[:8], ONE_HOT[:8])
    assert kept == [[0, 0], [1, 1]]


class Watched(layers.Layer):
    """A layer that keeps an eye on what it is given."""

    def __init__(self, make, see, **more):
        super().__init__(**more)
        self.meter = make()
        self.see = see

    def call(self, x):
        self.meter.update_state(self.see(x))
        return x


MEAN = keras.metrics.Mean
SEEN = {
    "late": (lambda: MEAN("seen"), lambda x: ops.mean(ops.relu(ops.abs(x) - 30.0))),
    "mean of samples": (lambda: MEAN("seen"), lambda x: ops.mean(ops.square(x), axis=-1)),
    "mean of means": (lambda: MEAN("seen"), lambda x: ops.mean(ops.square(x))),
    "mean of sums": (lambda: MEAN("seen"), lambda x: ops.sum(ops.square(x))),
    "sum": (lambda: keras.metrics.Sum("seen"), lambda x: ops.sum(x, axis=-1)),
}


def watched():
    """Metrics early, in the middle and late, in a nested model, and in a layer called twice."""
    x = inputs = keras.Input((6,))
    twice = Watched(*SEEN["mean of means"], name="twice")
    for i, kind in enumerate(SEEN.values()):
        x = Watched(*kind, name=f"watched_{i}")(x)
        x = twice(layers.Dense(6, activation="tanh")(x)) if i < 2 else x
    nested = chain((6,), Watched(*SEEN["sum"], name="inner"))
    model = keras.Model(inputs, layers.Softmax()(layers.Dense(3)(nested(x))))
    for i, metric in enumerate(model.metrics):
        metric.name = f"seen_{i}"
    return model


class Watching(keras.Model):
    """A subclassed model with a metric that its call updates, and one that nothing does."""

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(3, activation="softmax")
        self.seen, self.unused = MEAN("seen"), keras.metrics.Sum("unused")

    def call(self, x):
        self.seen.update_state(ops.square(x))
        return self.last(x)


def watching():
    model = Watching()
    model(keras.Input((6,)))
    return model


f1 = functools.partial(keras.metrics.F1Score, average=None, name="m")
CASES = {
    "compiled": case([f1, Extremes, *ADDITIVE, *OF_THE_WHOLE_BATCH]),
    "in layers": case([], watched),
}


@functools.cache
def in_keras(name):
    return used(make(CASES[name]))


class ByItsMetric(layers.Layer):
    """Multiplies by the number of samples that it has seen."""

    def __init__(self):
        super().__init__(name="eye")
        self.seen = keras.metrics.Sum("seen")

    def call(self, x):
        scaled = x * (1 + 0.05 * self.seen.result())
        self.seen.update_state(ops.ones_like(x[:, 0]))
        return scaled


def test_a_layer_that_computes_with_its_metric_is_refused_by_name():
    model = PipelineModel(chain((6,), ByItsMetric(), layers.Dense(3)), 1, 2)
    model.compile(sgd(), "mse")
    with pytest.raises(UnsupportedModelError, match=r"'eye' computes with .* metric 'seen'"):
        model.train_on_batch(X, ONE_HOT)


def test_a_metric_in_a_layer_that_shows_nothing_at_first_is_a_mean():
    def build():
        eye = Watched(*SEEN["late"], name="eye")
        return chain((6,), layers.Dense(6), eye, layers.Dense(3, activation="softmax"))

    one, found = case([], build), []
    for model in make(one), make(one, num_stages=2, num_micro_batches=3):
        each = [model.train_on_batch(s * X, ONE_HOT, return_dict=True) for s in (1.0, 1e3)]
        found.append([*map(lists_of, each)])
    assert distance(found[0][1], found[1][1]) < ROUNDING
    assert found[0][1]["seen"] > found[0][0]["seen"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "see",
    [lambda x: ops.square(ops.sum(x)) + ops.zeros_like(x[:, 0]), lambda x: ops.max(x, axis=0)],
)
def test_a_metric_in_a_layer_that_micro_batches_would_change_is_refused_by_name(see):
    def build():
        eye = Watched(lambda: MEAN("seen"), see, name="eye")
        return chain((6,), eye, layers.Dense(6), layers.Dense(3, activation="softmax"))

    one = case([], build)
    model = make(one, num_stages=2, num_micro_batches=3)
    with pytest.raises(UnsupportedModelError, match=r"'eye'.*'seen'.*num_micro_batches=1"):
        model.train_on_batch(X, ONE_HOT)
    logs = [
        lists_of(each.train_on_batch(X, ONE_HOT, return_dict=True))
        for each in (make(one), make(one, num_stages=2, num_micro_batches=1))
    ]
    assert distance(*logs) < ROUNDING


def reading(model, found):
    """Reads the compiled metrics in the middle of an epoch and at its end."""

    def read(logs):
        try:
            found.append([float(model.metrics[0].result()), logs["loss"]])
        except StaleWeightError as error:
            found.append(str(error))

    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 1 and read(logs),
        on_epoch_end=lambda epoch, logs: read(logs),
    )


def see(**options):
    """Metrics of layers, read while the model is evaluated and predicts."""

    def build():
        ends = [Watched(*SEEN["mean of samples"]) for _ in range(2)]
        return keras.Sequential([keras.Input(X.shape[1:]), ends[0], perceptron(), ends[1]])

    def read(batch, logs):
        for metric in model.metrics[1:]:
            try:
                found.append(float(metric.result()))
            except StaleWeightError:
                found.append(None)

    model, found = make(Case(build, X, ONE_HOT, lambda: {"loss": "mse"}), **options), []
    sees = keras.callbacks.LambdaCallback(on_test_batch_end=read, on_predict_batch_end=read)
    model.evaluate(X, ONE_HOT, batch_size=BATCH, verbose=0, callbacks=[sees])
    model.predict(X, batch_size=BATCH, verbose=0, callbacks=[sees])
    return found


def use_stages():
    """Metrics of both kinds in a pipeline, in trainings that end early or begin anew, too."""
    found, read, options = {}, [], {"batch_size": BATCH, "verbose": 0}

    def fitted(model, after):
        on_end = keras.callbacks.LambdaCallback(on_train_batch_end=lambda n, logs: after(model, n))
        return model.fit(X, ONE_HOT, callbacks=[on_end], **options).history

    for name, one in CASES.items():
        model = make(one, num_stages=2, num_micro_batches=3)
        found[name] = used(model)
        fitted(model, lambda model, n: setattr(model, "stop_training", n == 1))
        found[f"cut {name}"] = [lists_of(metric.result()) for metric in model.metrics]
        found[f"reset {name}"] = lists_of(fitted(model, lambda model, _: model.reset_metrics()))
    model.fit(X, ONE_HOT, callbacks=[reading(model, read)], **options)
    return found, read, see(num_stages=2, num_micro_batches=3)


class Largest(keras.metrics.Metric):
    """The largest number seen so far, or 1."""

    def __init__(self):
        super().__init__(name="largest")
        self.number = self.add_variable((), "ones", name="number")

    def update_state(self, values):
        self.number.assign(ops.maximum(self.number, ops.max(values)))

    def result(self):
        return self.number


def use_replicas():
    """Metrics in layers on replicas, and a maximum over samples, which does not add up."""
    model = make(CASES["in layers"], num_stages=1, num_micro_batches=2)
    found = [lists_of(model.test_on_batch(X[:1], ONE_HOT[:1], return_dict=True))]
    found.append(used(model)["numbers"])
    for stages in (1, 2):
        eye = Watched(Largest, lambda x: x, name="eye")
        stack = [keras.Input((6,)), eye, layers.Dense(4), layers.Dense(3)]
        model = PipelineModel(keras.Sequential(stack), stages, num_micro_batches=2)
        model.compile("sgd", "mse")
        train = functools.partial(model.train_on_batch, X, ONE_HOT, return_dict=True)
        found.append(train()["largest"] if stages == 2 else error_of(train))
    return found


def use_both():
    training.use_float64()
    return use_stages(), use_replicas()


@pytest.mark.slow
@pytest.mark.mpi
def test_every_rank_has_the_logs_and_the_metrics_of_one_process():
    (first, summed), (second, also_summed) = mpi_run(2, use_both, timeout=240).check().results
    check_stages(first, second)
    one = make(CASES["in layers"]).test_on_batch(X[:1], ONE_HOT[:1], return_dict=True)
    for of_one, found, refused, largest in (summed, also_summed):
        assert distance(lists_of(one), of_one) < ROUNDING
        assert distance(in_keras("in layers")["numbers"], found) < ROUNDING
        assert re.search("'eye'.*'largest'.*num_replicas=2", refused)
        assert largest == pytest.approx(X.max())


def check_stages(on_first, on_last):
    (first, (refused, end), seen), (second, read, also_seen) = on_first, on_last
    assert first == second
    for here, there, known in zip(seen, also_seen, see(), strict=True):
        values = [value for value in (here, there) if value is not None]
        assert values == pytest.approx([known] * len(values))
        assert values
    assert None in seen
    assert "`logs`" in refused
    assert end == read[1]
    assert all(value == logged for value, logged in read)
    for name in CASES:
        assert first[f"reset {name}"]["loss"] == [0.0]  # as in Keras
        assert in_keras(name)["kinds"] == first[name]["kinds"], name
        assert distance(in_keras(name)["numbers"], first[name]["numbers"]) < ROUNDING, name
