"""Small models of all kinds, trained by plain Keras and as pipelines, and how far apart they end.

Everything is in float64: tests of `tests/face` run in it, other processes call `use_float64()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tarantella_pp.models.pipeline_model import PipelineModel

SAMPLES, BATCH, EPOCHS = 22, 8, 2  # three steps an epoch, the last one with 6 samples


def use_float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def floats(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(SAMPLES, *shape))


def integers(high, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, high, size=(SAMPLES, *shape)).astype("int32")


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adamw():
    return keras.optimizers.AdamW(1e-2)


@dataclass(frozen=True)
class Case:
    """A model, its data and how it is trained; `compiled` makes new objects at every call."""

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    compiled: Callable[[], dict[str, Any]]
    fit: dict[str, Any] = field(default_factory=dict)
    batch_statistics: bool = False  # differs from Keras with several micro-batches, and may
    schedules: tuple[str | None, ...] = ("1f1b", "gpipe")


def mlp():
    x = inputs = keras.Input((6,))
    for width in (7, 8, 7):
        x = layers.Dense(width, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def wide():
    """Gradients of wide layers are collected by their factors, the last one's too."""
    x = inputs = keras.Input((24,))
    for activation in ("tanh", "relu", None):
        x = layers.Dense(24, activation=activation)(x)
    return keras.Model(inputs, layers.Add()([x, layers.Dense(24, use_bias=False)(x)]))


def whole_sample_norm():
    return layers.LayerNormalization(axis=[1, 2, 3])


def residual_cnn(normalization=whole_sample_norm):
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    for _ in range(2):
        y = normalization()(x)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(4, 3, padding="same", use_bias=False)(y)
        x = layers.Add()([x, y])
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def two_in_two_out():
    a, b = keras.Input((4,), name="a"), keras.Input((5,), name="b")
    x = layers.Dense(6, activation="tanh")(a)
    early = layers.Dense(3, activation="softmax", name="early")(x)
    x = layers.Concatenate()([x, layers.Dense(6)(b)])
    x = layers.Dense(5, activation="elu")(x)
    return keras.Model([a, b], [layers.Dense(2, name="late")(x), early])


def long_skip():
    x = inputs = keras.Input((6,))
    skip = layers.Dense(6)(x)
    x = layers.Dense(6, activation="elu")(skip)
    x = layers.Dense(6, activation="elu")(x)
    x = layers.Dense(6, activation="elu")(x)
    x = layers.Add()([x, skip, layers.Dense(6)(inputs)])
    return keras.Model(inputs, layers.Dense(3)(x))


def causal_attention():
    inputs = keras.Input((5, 8))
    x = layers.LayerNormalization()(inputs)
    # Without biases: the gradient of that of the keys is zero, so Adam follows rounding errors.
    x = layers.MultiHeadAttention(2, 4, use_bias=False)(x, x, use_causal_mask=True)
    h = layers.Add()([inputs, x])
    x = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(h))
    x = layers.Dense(8)(x) + h
    return keras.Model(inputs, layers.Dense(3)(x[:, -1]))


def embedding_with_mask():
    ids = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 4, mask_zero=True)(ids)
    x = layers.Dense(5, activation="tanh")(x)
    x = layers.MultiHeadAttention(2, 3, use_bias=False)(x, x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, layers.Dense(3, activation="softmax")(x))


def recurrent():
    ids = keras.Input((4,), dtype="int32")
    x = layers.Embedding(6, 4, mask_zero=True)(ids)
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.LSTM(3)(x)
    return keras.Model(ids, layers.Dense(3, activation="softmax")(x))


def masked_output():
    ids = keras.Input((4,), dtype="int32")
    x = layers.Embedding(6, 4, mask_zero=True)(ids)
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(ids, layers.Dense(3, activation="softmax")(x))


def regularized():
    x = inputs = keras.Input((6,))
    shared = layers.Dense(6, activation="tanh", activity_regularizer=keras.regularizers.L2(0.1))
    x = shared(x)
    x = layers.Dense(6, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1))(shared(x))
    x = layers.ActivityRegularization(l2=0.05)(x)
    x = layers.Dense(6, bias_regularizer=keras.regularizers.L2(0.1), activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))(x))


def nested():
    i = keras.Input((6,))
    inner = keras.Model(i, layers.Dense(6, activation="tanh")(layers.Dense(5)(i)), name="inner")
    head = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)], name="head")
    inputs = keras.Input((6,))
    return keras.Model(inputs, head(inner(inner(layers.Dense(6)(inputs)) + 1.0)))


def shared():
    inputs = keras.Input((6,))
    twice = layers.Dense(6, activation="tanh")
    x = layers.Dense(6, activation="elu")(twice(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(6)(twice(x))))


def tied_head():
    """A language model whose last layer has the weights of its first."""
    ids = keras.Input((5,), dtype="int32")
    table = layers.ReversibleEmbedding(6, 4, embeddings_regularizer=keras.regularizers.L2(0.1))
    x = table(ids)
    for _ in range(2):
        x = layers.Add()([x, layers.Dense(4, activation="tanh")(x)])
    return keras.Model(ids, table(layers.LayerNormalization()(x), reverse=True))


def looked_up_again():
    """The second look into the embedding depends on the first, and both gradients are sparse."""
    ids = keras.Input((5,), dtype="int32")
    table = layers.Embedding(6, 4)
    x = layers.Dense(4, activation="tanh")(table(ids))
    x = layers.Add()([layers.Dense(4)(x), table(ops.argmax(x, axis=-1))])
    x = layers.Dense(4, activation="tanh")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(ids, layers.Dense(3, activation="softmax")(x))


def tied_blocks():
    """The same layer in every other place, once before a branch whose gradient is stopped."""
    x = inputs = keras.Input((6,))
    block = layers.Dense(6, activation="tanh")
    frozen = layers.Dense(6, activation="tanh", trainable=False)
    for _ in range(3):
        x = layers.Dense(6, activation="elu")(frozen(block(x)))
    dead = ops.stop_gradient(block(x))
    return keras.Model(inputs, layers.Dense(3)(layers.Add()([x, dead])))


def frozen():
    x = inputs = keras.Input((6,))
    for width, trainable in ((6, False), (7, False), (6, True), (7, False), (3, True)):
        x = layers.Dense(width, activation="tanh", trainable=trainable)(x)
    return keras.Model(inputs, x)


def unreached():
    inputs = keras.Input((6,))
    x = layers.Dense(6, activation="tanh")(inputs)
    dead = layers.Dense(6, activation="tanh")(layers.Dense(6)(x))
    x = layers.Dense(6, activation="tanh")(x) + ops.stop_gradient(dead)
    return keras.Model(inputs, [layers.Dense(3, name="used")(x), layers.Dense(2, name="unused")(x)])


def dropout():
    x = inputs = keras.Input((6,))
    for seed, width in enumerate((7, 8, 7)):
        x = layers.Dense(width, activation="tanh")(x)
        x = layers.Dropout(0.3, seed=seed)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GaussianNoise(0.1, seed=9)(x)))


class Table(layers.Layer):
    """Gives a table of positions and a scale, neither of which has rows of samples."""

    def build(self, shape):
        self.table = self.add_weight(shape=(1, *shape[1:]), initializer="normal", name="table")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return 1.0 * self.table, 2.0 * self.scale


def merged_windows():
    """Samples merged with windows, as in Swin, a table of positions, time before samples."""
    inputs = keras.Input((4, 6))
    x = layers.Dense(6, activation="tanh")(inputs)
    table, scale = Table()(x)
    windows = ops.reshape(x, (-1, 2, 6))
    windows = layers.Add()([windows, layers.Dense(6, activation="tanh")(windows)])
    windows = layers.MultiHeadAttention(2, 3, use_bias=False)(windows, windows)
    x = ops.reshape(layers.Dense(6)(windows), (-1, 4, 6)) * scale + table
    x = layers.Dense(6, activation="tanh")(ops.transpose(x, (1, 0, 2)))
    x = layers.Flatten()(ops.transpose(x, (1, 0, 2)))
    return keras.Model(inputs, layers.Dense(3)(x))


def sequential():
    return keras.Sequential(
        [keras.Input((6,)), *(layers.Dense(n, activation="tanh") for n in (7, 8)), layers.Dense(3)]
    )


def squared_of_largest(y_true, y_pred):
    """Looks at all samples at once, as losses of contrastive learning do."""
    error = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return error * ops.stop_gradient(1.0 + error / ops.max(error))


def regression(loss="mse", optimizer=adamw, **more):
    return lambda: {"optimizer": optimizer(), "loss": loss() if callable(loss) else loss, **more}


def classification(optimizer=adamw, metrics=("accuracy",), **more):
    return lambda: {
        "optimizer": optimizer(),
        "loss": "sparse_categorical_crossentropy",
        "metrics": list(metrics),
        **more,
    }


def logits():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": adamw(), "loss": loss, "metrics": ["accuracy"]}


def decaying():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, clipnorm=0.05)


def accumulating():
    return keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2, global_clipnorm=0.1)


WEIGHTS = np.random.default_rng(5).uniform(0.2, 2, size=SAMPLES)
WEIGHTED = {"sample_weight": WEIGHTS}
X, Y, LABELS = floats(6), floats(3, seed=1), integers(3, seed=2)
IDS = integers(6, 5, seed=3)

CASES = {
    "mlp": Case(mlp, X, Y, regression(optimizer=sgd, metrics=["mae"]), WEIGHTED),
    "wide": Case(wide, floats(24), floats(24, seed=1), regression(), WEIGHTED),
    "sequential": Case(sequential, X, Y, regression()),
    "residual_cnn": Case(residual_cnn, floats(6, 6, 2), LABELS, classification(sgd), WEIGHTED),
    "batch_norm": Case(
        functools.partial(residual_cnn, layers.BatchNormalization),
        floats(6, 6, 2),
        LABELS,
        classification(),
        batch_statistics=True,
    ),
    "two_in_two_out": Case(
        two_in_two_out,
        [floats(4), floats(5)],
        [floats(2), LABELS],
        lambda: {
            "optimizer": adamw(),
            "loss": ["huber", "sparse_categorical_crossentropy"],
            "loss_weights": [0.7, 2.0],
            "metrics": [["mae"], ["accuracy"]],
            "weighted_metrics": [["mse"], []],
        },
        {"sample_weight": [WEIGHTS, WEIGHTS[::-1].copy()]},
    ),
    "long_skip": Case(long_skip, X, Y, regression(optimizer=sgd)),
    "causal_attention": Case(causal_attention, floats(5, 8), Y, regression(), WEIGHTED),
    "merged_windows": Case(merged_windows, floats(4, 6), Y, regression(), WEIGHTED),
    "embedding_adamw": Case(embedding_with_mask, IDS, LABELS, classification(), WEIGHTED),
    "embedding_sgd": Case(embedding_with_mask, IDS, LABELS, classification(sgd)),
    "recurrent": Case(recurrent, IDS[:, 1:], LABELS, classification(), WEIGHTED),
    "masked_output": Case(
        masked_output,
        IDS[:, 1:],
        integers(3, 4, seed=4),
        classification(weighted_metrics=["accuracy"]),
        {"sample_weight": np.random.default_rng(6).uniform(0.2, 2, size=(SAMPLES, 4))},
        schedules=(None, "gpipe"),
    ),
    "regularized": Case(regularized, X, Y, regression(), WEIGHTED),
    "nested": Case(nested, X, Y, regression()),
    "shared": Case(shared, X, Y, regression(optimizer=sgd)),
    "tied_head": Case(tied_head, IDS, integers(6, 5, seed=8), logits),
    "looked_up_again": Case(looked_up_again, IDS, LABELS, classification(), WEIGHTED),
    "tied_blocks": Case(tied_blocks, X, Y, regression(optimizer=sgd), WEIGHTED),
    "frozen": Case(frozen, X, Y, regression(), WEIGHTED),
    "unreached": Case(
        unreached,
        X,
        {"used": Y, "unused": floats(2)},
        regression(loss=lambda: {"used": "mse", "unused": None}),
    ),
    "class_weight": Case(
        mlp,
        X,
        LABELS,
        lambda: {
            "optimizer": adamw(),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            "weighted_metrics": ["accuracy"],
        },
        {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
    ),
    "area_under_curve": Case(
        lambda: keras.Sequential([mlp(), layers.Dense(1, activation="sigmoid")]),
        X,
        integers(2, 1, seed=7),
        regression("binary_crossentropy", metrics=["AUC"]),
    ),
    "sum": Case(
        mlp,
        X,
        Y,
        regression(lambda: keras.losses.MeanSquaredError(reduction="sum"), sgd),
        WEIGHTED,
    ),
    "mean_with_sample_weight": Case(
        mlp,
        X,
        Y,
        regression(lambda: keras.losses.Huber(reduction="mean_with_sample_weight")),
        WEIGHTED,
    ),
    "custom_loss": Case(
        mlp, X, Y, regression(lambda: squared_of_largest), schedules=(None, "gpipe")
    ),
    "schedule_clipnorm": Case(mlp, X, Y, regression(optimizer=decaying)),
    "accumulation": Case(mlp, X, Y, regression(optimizer=accumulating)),
    "dropout": Case(dropout, X, Y, regression(), WEIGHTED, batch_statistics=True),
}


@dataclass(frozen=True)
class Outcome:
    """What training leaves behind."""

    history: dict[str, list[float]]
    evaluation: dict[str, float]
    predictions: Any
    weights: list[Any]

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it, every bit kept."""
        arrays = [self.predictions, self.weights]
        lists = keras.tree.map_structure(lambda array: np.asarray(array).tolist(), arrays)
        return dict(zip(FIELDS, [self.history, self.evaluation, *lists], strict=True))


FIELDS = ("history", "evaluation", "predictions", "weights")


def make(case: Case, **options: Any) -> keras.Model:
    """Makes a compiled model of plain Keras, or with options a pipeline."""
    keras.utils.set_random_seed(1)
    model = case.build()
    if options:
        model = PipelineModel(model, **options)
        model.compile(**case.compiled())
    else:
        # Eager steps give the same numbers, and these models would be traced longer than run.
        # But the logs of single outputs of Keras depend on it where the last batch is short.
        model.compile(**case.compiled(), run_eagerly=not isinstance(case.y, (list, dict)))
    return model


def finish(model: keras.Model, case: Case, epochs: int = EPOCHS) -> Outcome:
    """Trains a compiled model, evaluates it and predicts."""
    quiet = {"batch_size": BATCH, "verbose": 0}
    told = model.fit(case.x, case.y, epochs=epochs, shuffle=False, **quiet, **case.fit)
    weights = {k: v for k, v in case.fit.items() if k == "sample_weight"}
    evaluation = model.evaluate(case.x, case.y, return_dict=True, **quiet, **weights)
    predictions = model.predict(case.x, **quiet)
    return Outcome(told.history, evaluation, predictions, model.get_weights())


@functools.cache
def serial(name: str) -> Outcome:
    """What plain Keras makes of a case."""
    return finish(make(CASES[name]), CASES[name])


@functools.cache
def piped(name: str, stages: int, micro_batches: int, schedule: str | None) -> Outcome:
    """What a pipeline in this process makes of a case."""
    case = CASES[name]
    options = {"num_stages": stages, "num_micro_batches": micro_batches, "schedule": schedule}
    return finish(make(case, **options), case)


def distance(first: Any, second: Any, name: str = "") -> float:
    """Largest difference, relative to the largest number of each array or list of numbers."""
    if isinstance(first, Outcome):
        first = first.plain()
    if isinstance(second, Outcome):
        second = second.plain()
    if isinstance(first, dict):
        assert set(first) == set(second), (sorted(first), sorted(second))
        return max((distance(first[key], second[key], key) for key in first), default=0.0)
    if isinstance(first, (list, tuple)) and (name == "weights" or not _numbers(first)):
        assert len(first) == len(second)
        return max(distance(a, b) for a, b in zip(first, second, strict=True))
    a, b = np.asarray(first, float), np.asarray(second, float)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert np.isfinite(a).all()
    if not a.size or (a == b).all():
        return 0.0
    # What should be zero, as the gradient of the bias of the keys of an attention, is rounding.
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-5))


def _numbers(items: Any) -> bool:
    """Whether nested lists are one array: all numbers, all rows as long."""
    try:
        return np.asarray(items).dtype.kind in "fiub"
    except ValueError:
        return False
