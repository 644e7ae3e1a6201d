"""Small models of all kinds, trained by plain Keras and as pipelines, and how far apart they end.

Everything is in float64: tests of `tests/face` run in it, other processes call `use_float64()`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import world
from tests.zoo import models

ROUNDING = 1e-10
BITS = 1e-13
"""For the same sums elsewhere: one micro-batch, or another number of stages."""
SAMPLES, BATCH, EPOCHS = 22, 8, 2  # three steps an epoch, the last one with 6 samples


def use_float64():
    use_types("float64", "float64")


def use_types(floatx, policy):
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def in_precision(floatx, policy):
    """Has Keras compute in other types for a while."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    use_types(floatx, policy)
    try:
        yield
    finally:
        use_types(*before)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(SAMPLES, *shape))


def integers(high, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, high, size=(SAMPLES, *shape)).astype("int32")


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adamw():
    return keras.optimizers.AdamW(1e-2)


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as tutorials write it: it cannot be saved, for it has no `get_config`."""

    def __call__(self, step):
        step = ops.cast(step + 1, keras.config.floatx())
        return 1e-2 * ops.minimum(1 / ops.sqrt(step), step / 4)


@dataclass(frozen=True)
class Case:
    """A model, its data and how it is trained; `compiled` makes new objects at every call."""

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    compiled: Callable[[], dict[str, Any]]
    fit: dict[str, Any] = field(default_factory=dict)
    batch_statistics: bool = False  # differs from Keras with several micro-batches, and may
    batch: int = BATCH


def squared_of_largest(y_true, y_pred):
    """Looks at all samples at once, as losses of contrastive learning do."""
    error = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return error * ops.stop_gradient(1.0 + error / ops.max(error))


def regression(loss="mse", optimizer=sgd, **more):
    return lambda: {"optimizer": optimizer(), "loss": loss() if callable(loss) else loss, **more}


def classification(optimizer=sgd, metrics=("accuracy",), **more):
    return lambda: {
        "optimizer": optimizer(),
        "loss": "sparse_categorical_crossentropy",
        "metrics": list(metrics),
        **more,
    }


def from_logits():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def logits():
    return {"optimizer": adamw(), "loss": from_logits(), "metrics": ["accuracy"]}


WEIGHTS = np.random.default_rng(5).uniform(0.2, 2, size=SAMPLES)
WEIGHTED = {"sample_weight": WEIGHTS}
X, Y, LABELS = floats(6), floats(3, seed=1), integers(3, seed=2)
IDS = integers(6, 5, seed=3)

CASES = {
    "mlp": Case(models.mlp, X, Y, regression(metrics=["mae"]), WEIGHTED),
    "residual_cnn": Case(models.residual_cnn, floats(6, 6, 2), LABELS, classification(), WEIGHTED),
    "batch_norm": Case(
        lambda: models.batch_norm_cnn(blocks=1), floats(6, 6, 2), LABELS, classification(),
        batch_statistics=True,
    ),
    "two_in_two_out": Case(
        models.two_in_two_out, [floats(4), floats(5)], [floats(2), LABELS],
        lambda: {
            "optimizer": adamw(),
            "loss": ["huber", "sparse_categorical_crossentropy"],
            "loss_weights": [0.7, 2.0],
            "metrics": [["mae"], ["accuracy"]],
            "weighted_metrics": [["mse"], []],
        },
        {"sample_weight": [WEIGHTS, WEIGHTS[::-1].copy()]},
    ),
    "long_skip": Case(models.long_skip, X, Y, regression()),
    "merged_windows": Case(models.merged_windows, floats(4, 6), Y, regression(), WEIGHTED),
    "embedding_adamw": Case(
        models.embedding_with_mask, IDS, LABELS, classification(adamw), WEIGHTED
    ),
    "positions": Case(
        models.positions, IDS, LABELS, classification(lambda: keras.optimizers.AdamW(WarmUp())),
        WEIGHTED | {"validation_data": (IDS[:9], LABELS[:9])},
    ),
    "regularized": Case(models.regularized, X, Y, regression(optimizer=adamw), WEIGHTED),
    "tied_head": Case(models.tied_head, IDS, integers(6, 5, seed=8), logits),
    "looked_up_again": Case(models.looked_up_again, IDS, LABELS, classification(adamw), WEIGHTED),
    "counted": Case(models.counted, IDS, Y, regression(), WEIGHTED),
    "half_in_training": Case(models.half_in_training, floats(4, 6), Y, regression(), WEIGHTED),
    "tied_blocks": Case(models.tied_blocks, X, Y, regression(), WEIGHTED),
    "adapted": Case(models.adapted, X, Y, regression(), WEIGHTED),
    "unreached": Case(
        models.unreached, X, {"used": Y, "unused": floats(2)},
        regression(loss=lambda: {"used": "mse", "unused": None}, optimizer=adamw),
    ),
    "dropout": Case(models.dropout, X, Y, regression(), WEIGHTED, batch_statistics=True),
}  # fmt: skip


def evenly(case: Case) -> Case:
    """A case without its last batch, which is smaller: stages are traced for one size then."""

    def first(part: Any) -> Any:
        return part[: SAMPLES // BATCH * BATCH] if isinstance(part, np.ndarray) else part

    x, y, fit = (keras.tree.map_structure(first, part) for part in (case.x, case.y, case.fit))
    return dataclasses.replace(case, x=x, y=y, fit=fit)


CASES |= {f"{name}, evenly": evenly(case) for name, case in CASES.items()}


def lists_of(values: Any) -> Any:
    """Arrays, tensors and numbers in a structure as JSON can hold them."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), values)


def compiled(model: keras.Model, *given: Any, **options: Any) -> keras.Model:
    """The same model, which has been compiled."""
    model.compile(*given, **options)
    return model


def begun(build: Any, wrap: Any, *given: Any, seed: int = 1, **options: Any) -> keras.Model:
    """A new model, compiled: wrapped, or plain with eager steps, the same numbers sooner."""
    keras.utils.set_random_seed(seed)
    model = wrap(build()) if wrap else build()
    return compiled(model, *given, run_eagerly=wrap is None, **options)


Outcome = dict[str, Any]
"""What training leaves behind, as JSON can hold it: every number and every bit of it."""


def make(case: Case, **options: Any) -> keras.Model:
    """Makes a compiled model of plain Keras, or with options a pipeline."""
    keras.utils.set_random_seed(1)
    model = case.build()
    if options:
        return compiled(PipelineModel(model, **options), **case.compiled())
    # Eager steps give the same numbers, and these models would be traced longer than run.
    # But the logs of single outputs of Keras depend on it where the last batch is short.
    several = isinstance(case.y, (list, dict))
    short = several and len(keras.tree.flatten(case.x)[0]) % case.batch
    return compiled(model, **case.compiled(), run_eagerly=not short, jit_compile=False)


def fitted(model: keras.Model, case: Case, epochs: int = EPOCHS) -> Outcome:
    """Trains a compiled model."""
    options = {"batch_size": case.batch, "shuffle": False, "verbose": 0, **case.fit}
    told = model.fit(case.x, case.y, epochs=epochs, **options)
    return {"history": told.history, "weights": [w.tolist() for w in model.get_weights()]}


def finish(model: keras.Model, case: Case, epochs: int = EPOCHS) -> Outcome:
    """Trains a compiled model, evaluates it and predicts."""
    trained = fitted(model, case, epochs)
    quiet = {"batch_size": case.batch, "verbose": 0}
    weights = {k: v for k, v in case.fit.items() if k == "sample_weight"}
    evaluation = model.evaluate(case.x, case.y, return_dict=True, **quiet, **weights)
    predictions = model.predict(case.x, **quiet)
    return {**trained, "evaluation": evaluation, "predictions": lists_of(predictions)}


def data_of_rank(case: Case) -> Case:
    """Rank 0 has the data, and sends the others their parts."""
    if world().rank == 0:
        return case
    return dataclasses.replace(case, x=None, y=None, fit=dict.fromkeys(case.fit))


def compiled_once(build: Callable[..., keras.Model]) -> Callable[..., keras.Model]:
    """Has a function compile a model once, and give it back as it was then, with new seeds.

    In one process only: it writes into variables.
    """

    @functools.cache
    def begun(*args: Any, **options: Any) -> tuple[keras.Model, list[tuple[Any, Any]]]:
        model = build(*args, **options)
        model.optimizer.build(model.trainable_variables)
        return model, [(v, v.numpy()) for v in (*model.variables, *model.optimizer.variables)]

    @functools.wraps(build)
    def restarted(*args: Any, **options: Any) -> keras.Model:
        model, start = begun(*args, **options)
        for variable, value in start:
            variable.assign(value)
        model.reset_metrics()
        keras.utils.set_random_seed(1)
        return model

    return restarted


def state_of(model: keras.Model) -> list[np.ndarray]:
    """What training has made of a model: weights, and what the optimizer keeps."""
    return [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


def begin_again(model: keras.Model, start: list[np.ndarray]) -> keras.Model:
    """Has a model, also one on ranks, forget its training; to compile it anew takes longer."""
    model.set_weights(start)
    for variable in model.optimizer.variables:
        if variable is not model.optimizer.learning_rate:
            variable.assign(keras.ops.zeros_like(variable))
    return model


def trained(model: keras.Model, name: str) -> Outcome:
    """What comes of a case; where all batches are of one size, of `fit` only."""
    return (fitted if "evenly" in name else finish)(model, data_of_rank(CASES[name]))


def distance(first: Any, second: Any, name: str = "") -> float:
    """Largest difference, relative to the largest number of each array or list of numbers."""
    if isinstance(first, dict):
        assert set(first) == set(second), (sorted(first), sorted(second))
        return max((distance(first[key], second[key], key) for key in first), default=0.0)
    if isinstance(first, (list, tuple)) and (name == "weights" or not _numbers(first)):
        assert len(first) == len(second)
        return max(distance(a, b) for a, b in zip(first, second, strict=True))
    a, b = np.asarray(first, float), np.asarray(second, float)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
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
