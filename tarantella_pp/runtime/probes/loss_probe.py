"""Whether a compiled loss can be computed one micro-batch after the other, found by trying."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals.functional import compute_output_spec
from tarantella_pp.internals.training import (
    reduces_values,
    sample_values,
    second_loss,
)
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.probes.linearity import following, nonlinear, uses_of_sums
from tarantella_pp.runtime.probes.parts import (
    ALL,
    MEAN,
    ROWS,
    SUM,
    Array,
    Compared,
    PartsProbe,
    chosen,
    rows_of,
    thirds,
)
from tarantella_pp.runtime.stage.model_outputs import unpacked
from tarantella_pp.runtime.stage.side_effects import effects_of

Shape = Sequence[int | None]

# Another number of samples than any size, so that no axis is taken for the batch by mistake.
_ROWS, _LARGEST = 5, 3
# Numbers of a sample's output beyond which fewer are tried.
_MANY = 100_000


class LossKinds(NamedTuple):
    """How the loss of a batch follows from its micro-batches."""

    reason: str | None  # why it does not, if so
    # For each loss, how its values follow: rows, or a mean or a sum over samples
    kinds: Sequence[str]


def whole_batch_reason(compiled: Any, extracted: ExtractedModel, y: Any = None) -> str | None:
    """Why the loss of a batch is not the sum of what its micro-batches contribute."""
    return loss_kinds(compiled, extracted, y).reason


def loss_kinds(compiled: Any, extracted: ExtractedModel, y: Any = None) -> LossKinds:
    """Tries all losses of a model; `y` describes the targets if they are known."""
    if compiled is None:
        return LossKinds(None, ())
    graph = extracted.graph
    if any(graph.tensors[output].mask_shape is not None for output in graph.outputs):
        return LossKinds(
            "the model's output carries a mask, and its loss counts unmasked entries only", ()
        )
    found: list[tuple[Any, Any, list[Shape]]] = []

    def note(loss: Any, y: Any, y_pred: Any, _: Any) -> Any:
        found.append((loss, y, [tuple(tensor.shape) for tensor in keras.tree.flatten(y_pred)]))
        return keras.ops.zeros(())

    outputs = unpacked(extracted.outputs_struct)
    try:
        compute_output_spec(second_loss(compiled, note), outputs if y is None else y, outputs)
    except (KeyError, TypeError, ValueError):
        if y is not None:
            raise  # as Keras does, at the first batch, of losses that do not fit the outputs
    trials = [_tried(loss, None if y is None else t, shapes) for loss, t, shapes in found]
    reason = next((reason for reason, _ in trials if reason), None)
    return LossKinds(reason, [kind for _, kind in trials])


def _tried(loss: Any, y: Any, shapes: Sequence[Shape]) -> tuple[str | None, str]:
    """Why a loss needs the whole batch, if it does; and the kind of its values."""
    if loss.reduction in (None, "none"):
        return f"loss '{loss.name}' has reduction={loss.reduction!r}", ROWS
    if len(shapes) != 1 or not reduces_values(loss):
        return f"loss '{loss.name}' may look at several samples at once", ROWS
    own = [] if y is None else keras.tree.flatten(y)
    found = value_kinds(loss, shapes[0], own[0] if len(own) == 1 else None)
    if found is None:
        return f"loss '{loss.name}' does not take the targets that it was tried with", ROWS
    kind = chosen(found, (ROWS, MEAN, SUM))
    if kind is None:
        return f"loss '{loss.name}' looks at several samples at once", ROWS
    return None, kind


def value_kinds(loss: Any, shape: Shape, y: Any = None) -> frozenset[str] | None:
    """Says how a loss follows from the losses of parts; `None` if it takes no targets.

    A loss that looks at several samples only where some of them are rare, or of a certain size or
    sign, shows itself with one of several kinds of data.
    """
    sizes = _sizes(shape)
    found = ALL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a loss thinks of made-up data
        trials = [_kinds(loss, *data) for data in _data(sizes, y)]
    known = [kinds for kinds in trials if kinds is not None]
    for kinds in known:
        found &= kinds
    return found if known else None


def _sizes(shape: Shape) -> list[int]:
    """The sizes of what a loss is tried with: its own, unless they are large or vary."""
    sizes = [_LARGEST if size is None else size for size in shape[1:]]
    return sizes if math.prod(sizes) <= _MANY else [min(size, _LARGEST) for size in sizes]


def _data(sizes: Sequence[int], y: Any) -> Iterator[tuple[Array, Array]]:
    """Targets of each kind that some loss takes, and outputs.

    These are values of any size, values beside zeros and ones, and numbers of classes.
    """
    rng = np.random.default_rng(0)
    y_pred, values = rng.uniform(0.1, 0.9, (2, _ROWS, *sizes))
    every_other = np.arange(_ROWS).reshape(-1, *[1] * len(sizes)) % 2
    beside = np.where(every_other, values, values > 0.5)  # the first part has zeros and ones alone
    numbers = rng.normal(scale=4.0, size=(2, _ROWS, *sizes))
    yield values, y_pred
    yield beside, y_pred
    yield numbers[0], numbers[1]
    if sizes:
        yield np.arange(y_pred[..., 0].size).reshape(y_pred.shape[:-1]) % 2, y_pred
    if y is not None and list(y.shape[1:]) != list(sizes) and None not in y.shape[1:]:
        own = rng.uniform(0.0, 1.0, (_ROWS, *y.shape[1:]))
        yield own, y_pred
        yield np.round(own), numbers[1]


def _kinds(loss: Any, y: Array, y_pred: Array) -> frozenset[str] | None:
    """The kinds that its values may be of with such data; `None` if it does not take them."""

    def values(y: tf.Tensor, y_pred: tf.Tensor) -> list[tf.Tensor]:
        found, mask = sample_values(loss, y, y_pred)
        return [found] if mask is None else [found, tf.cast(mask, found.dtype)]

    specs = [tf.TensorSpec([None, *data.shape[1:]], keras.config.floatx()) for data in (y, y_pred)]
    try:
        # TensorFlow warns on standard error of shapes that do not fit, but not while it traces.
        compute_output_spec(functools.partial(sample_values, loss), *map(_spec, (y, y_pred)))
        traced = tf.function(values, input_signature=specs, autograph=False)
        function = traced.get_concrete_function()
        if any(effects_of(function.graph.as_graph_def())):
            return frozenset()  # it draws random numbers, or counts how often it is called
        value, follows = function.outputs[0], following(function.graph, function.inputs[:2])
        if any(
            uses_of_sums([value], follows) if value.shape.rank else [nonlinear([value], follows)]
        ):
            return frozenset()  # samples may see each other, if only with other data
        probe = PartsProbe(function, function.inputs[:2], function.outputs)

        def tried(*data: Array) -> Compared:
            given = [tf.constant(d, s.dtype) for d, s in zip(data, specs, strict=True)]
            return probe.compare(_ROWS, thirds(_ROWS), functools.partial(rows_of, given))

        found = tried(y, y_pred)
        whole, *mask = found.whole.values
        if mask and not np.array_equal(mask[0], tried(y, y_pred[::-1]).whole.values[1]):
            return frozenset()  # a mask must follow from the targets
    except Exception:  # whatever a loss says to targets of another kind
        return None
    parts = [part.values for part in found.parts]
    if not all(np.isfinite(value).all() for values in ([whole], *parts) for value in values):
        return None
    if whole.ndim and whole.shape[0] != _ROWS:
        return frozenset()
    fits = all(part[0].shape[1:] == whole.shape[1:] for part in parts)
    if not fits and y.shape != y_pred.shape:
        return None  # Keras spreads such targets over other samples: refused with the batch itself
    kinds = [found.kinds(place) for place in range(1 + len(mask))]
    return frozenset.intersection(*kinds) & ({ROWS} if whole.ndim else {MEAN, SUM})


def _spec(data: Array) -> keras.KerasTensor:
    return keras.KerasTensor(data.shape, str(data.dtype))
