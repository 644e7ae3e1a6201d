"""A grammar of small models: what hypothesis draws are sentences, of which models are made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from hypothesis import strategies as st
from keras import layers, ops

from tests.helpers.training import Case
from tests.zoo.models import AddsLoss, chain

ROWS, TIMES, WIDTH, IDS = 12, 4, 4, 5
Tensor = Any


def nested(x: Tensor) -> Tensor:
    steps = layers.LayerNormalization(), layers.Dense(WIDTH, activation="tanh")
    return chain(x.shape[1:], *steps)(x)


def branches(x: Tensor) -> Tensor:
    parts = [layers.Dense(2, activation="tanh")(x), layers.Dense(2)(x)]
    return layers.Concatenate()(parts) * layers.Dense(WIDTH, activation="sigmoid")(x)


def twice(x: Tensor) -> Tensor:
    shared = layers.Dense(WIDTH, activation="tanh")
    return shared(layers.Dense(WIDTH)(shared(x)))


# What takes vectors or sequences of width WIDTH and gives the same.
ANYWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: layers.Dense(WIDTH, activation="tanh")(x),
    "regularized": lambda x: layers.Dense(
        WIDTH, activation="tanh", kernel_regularizer="l2", activity_regularizer="l1"
    )(x),
    "constrained": lambda x: layers.Dense(WIDTH, kernel_constraint="unit_norm")(x),
    "frozen": lambda x: layers.Dense(WIDTH, activation="tanh", trainable=False)(x),
    "layer norm": lambda x: layers.LayerNormalization()(x),
    "rms norm": lambda x: layers.RMSNormalization()(x),
    "group norm": lambda x: layers.GroupNormalization(2)(x),
    "prelu": lambda x: layers.PReLU()(x),
    "mean of losses": lambda x: AddsLoss(lambda y: 0.1 * ops.mean(ops.square(y)))(x),
    "sum of losses": lambda x: AddsLoss(lambda y: 0.1 * ops.sum(ops.square(y)))(x),
    "stopped": lambda x: x + ops.stop_gradient(layers.Dense(WIDTH)(x)),
    "nested": nested,
    "sequential": lambda x: keras.Sequential([layers.Dense(3, "elu"), layers.Dense(WIDTH)])(x),
    "skip": lambda x: layers.Add()([x, layers.Dense(WIDTH, activation="tanh")(x)]),
    "branches": branches,
    "twice": twice,
}
SEQUENCES: dict[str, Callable[[Tensor], Tensor]] = {
    # Without biases: the gradient of that of the keys is zero, so Adam follows rounding errors.
    "attention": lambda x: layers.MultiHeadAttention(2, 2, use_bias=False)(x, x),
    "causal attention": lambda x: layers.MultiHeadAttention(1, 3, use_bias=False)(
        x, x, use_causal_mask=True
    ),
    "convolution": lambda x: layers.Conv1D(WIDTH, 2, padding="same", activation="tanh")(x),
    "lstm": lambda x: layers.LSTM(WIDTH, return_sequences=True)(x),
    "gru": lambda x: layers.GRU(WIDTH, return_sequences=True)(x),
    "both ways": lambda x: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))(x),
    "each": lambda x: layers.TimeDistributed(layers.Dense(WIDTH))(x),
}
RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: layers.Dropout(0.3)(x),
    "noise": lambda x: layers.GaussianNoise(0.2)(x),
    "recurrent dropout": lambda x: (
        layers.GRU(WIDTH, return_sequences=True, dropout=0.3)(x)
        if len(x.shape) == 3
        else layers.AlphaDropout(0.2)(x)
    ),
}
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda x: x[:, -1],
    "lstm": lambda x: layers.LSTM(WIDTH)(x),
    "mean": lambda x: layers.GlobalAveragePooling1D()(x),
    "flat": lambda x: layers.Dense(WIDTH)(layers.Flatten()(x)),
}
LOSSES = {
    "mse": keras.losses.MeanSquaredError,
    "huber": keras.losses.Huber,
    "cosine": keras.losses.CosineSimilarity,
    "log cosh": keras.losses.LogCosh,
    "kl": lambda **kw: keras.losses.CategoricalCrossentropy(from_logits=True, **kw),
}
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
METRICS = {
    "mae": keras.metrics.MeanAbsoluteError,
    "rmse": keras.metrics.RootMeanSquaredError,
    "r2": keras.metrics.R2Score,
    "accuracy": keras.metrics.BinaryAccuracy,
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.02, clipnorm=1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "clipped": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.5),
    "accumulating": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True),
}


@dataclass(frozen=True)
class Sentence:
    inputs: tuple[str, ...]
    body: tuple[str, ...]
    end: str
    tail: tuple[str, ...]
    early: int | None
    loss: tuple[str, str]
    weighted: bool
    metrics: tuple[str, ...]
    optimizer: str
    batch: int
    schedule: str | None

    @property
    def random(self) -> bool:
        return any(word in RANDOM for word in self.body + self.tail)

    @property
    def outputs(self) -> int:
        return 1 + (self.early is not None)

    def build(self) -> keras.Model:
        inputs = [_input(kind, i) for i, kind in enumerate(self.inputs)]
        starts = [_start(kind, x) for kind, x in zip(self.inputs, inputs, strict=True)]
        x = layers.Add()(starts) if len(starts) > 1 else starts[0]
        seen = [x]
        for word in self.body:
            x = (ANYWHERE | SEQUENCES | RANDOM)[word](x)
            seen.append(x)
        x = ENDS[self.end](x)
        for word in self.tail:
            x = (ANYWHERE | RANDOM)[word](x)
        outputs = [layers.Dense(3, name="late")(x)]
        if self.early is not None:
            y = layers.GlobalMaxPooling1D()(seen[self.early % len(seen)])
            outputs.append(layers.Dense(3, name="early")(y))
        return keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])

    def case(self) -> Case:
        draw = np.random.default_rng(3)
        x = [
            draw.integers(0, IDS, size=(ROWS, TIMES)).astype("int32")
            if kind.endswith("ids")
            else draw.normal(size=(ROWS, TIMES, 3))
            for kind in self.inputs
        ]
        y = [draw.dirichlet(np.ones(3), size=ROWS) for _ in range(self.outputs)]
        weights = [draw.uniform(0.2, 2, size=ROWS) for _ in range(self.outputs)]
        x, y, weights = (part if len(part) > 1 else part[0] for part in (x, y, weights))
        weighted = {"sample_weight": weights} if self.weighted else {}
        return Case(self.build, x, y, self.compiled, weighted, batch=self.batch)

    def compiled(self) -> dict[str, Any]:
        """Arguments of `compile`, new ones at every call."""
        name, reduction = self.loss
        losses = [LOSSES[name](reduction=reduction) for _ in range(self.outputs)]
        metrics = [[METRICS[m]() for m in self.metrics] for _ in range(self.outputs)]
        single = self.outputs == 1
        return {
            "optimizer": OPTIMIZERS[self.optimizer](),
            "loss": losses[0] if single else losses,
            "loss_weights": None if single else [0.7, 2.0],
            "weighted_metrics": metrics[0] if single else metrics,
        }


def _input(kind: str, place: int) -> Tensor:
    if kind.endswith("ids"):
        return keras.Input((TIMES,), dtype="int32", name=f"in_{place}")
    return keras.Input((TIMES, 3), name=f"in_{place}")


def _start(kind: str, x: Tensor) -> Tensor:
    if kind.endswith("ids"):
        return layers.Embedding(IDS, WIDTH, mask_zero=kind == "masked ids")(x)
    return layers.Dense(WIDTH)(x)


def _words(*tables: dict[str, Any]) -> st.SearchStrategy[str]:
    return st.sampled_from([word for table in tables for word in table])


def sentences() -> st.SearchStrategy[Sentence]:
    """Draws models of up to eight parts, most of them without random numbers."""
    kinds = st.sampled_from(["floats", "ids", "masked ids"])
    plain = st.lists(_words(ANYWHERE, SEQUENCES), max_size=4)
    drawing = st.lists(_words(ANYWHERE, SEQUENCES, RANDOM), max_size=4)
    return st.builds(
        Sentence,
        inputs=st.lists(kinds, min_size=1, max_size=2).map(tuple),
        body=st.one_of(plain, plain, drawing).map(tuple),
        end=_words(ENDS),
        tail=st.lists(_words(ANYWHERE), max_size=3).map(tuple),
        early=st.one_of(st.none(), st.none(), st.integers(0, 3)),
        loss=st.tuples(_words(LOSSES), st.sampled_from(REDUCTIONS)),
        weighted=st.booleans(),
        metrics=st.lists(_words(METRICS), max_size=2, unique=True).map(tuple),
        optimizer=_words(OPTIMIZERS),
        batch=st.integers(3, 8),
        schedule=st.sampled_from([None, None, "gpipe", "1f1b"]),
    )
