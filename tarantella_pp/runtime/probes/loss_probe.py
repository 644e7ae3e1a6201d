"""Whether a compiled loss can be computed one micro-batch after the other, found by trying."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from tarantella_pp.keras_internals.functional import compute_output_spec
from tarantella_pp.keras_internals.training import (
    is_keras_loss,
    sample_values,
    second_loss,
)
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.runtime.modules.model_outputs import unpacked

Array = NDArray[Any]

_ROWS, _LARGEST = 5, 3
"""Another number of samples than any size, so that no axis is taken for the batch by mistake."""
_KEPT = np.arange(_ROWS) % 2 == 0


def whole_batch_reason(compiled: Any, extracted: ExtractedModel, y: Any = None) -> str | None:
    """Why the loss of a batch is not the sum of what its micro-batches contribute."""
    if compiled is None:
        return None
    graph = extracted.graph
    if any(graph.tensors[output].mask_shape is not None for output in graph.outputs):
        return "the model's output carries a mask, and its loss counts unmasked entries only"
    found: list[tuple[Any, list[Any]]] = []

    def note(loss: Any, _: Any, y_pred: Any, __: Any) -> Any:
        found.append((loss, [tuple(tensor.shape) for tensor in keras.tree.flatten(y_pred)]))
        return keras.ops.zeros(())

    outputs = unpacked(extracted.outputs_struct)
    try:
        compute_output_spec(second_loss(compiled, note), outputs if y is None else y, outputs)
    except (KeyError, TypeError, ValueError):
        if y is not None:
            raise  # as Keras does, at the first batch, of losses that do not fit the outputs
    reasons = (_reason(loss, shapes) for loss, shapes in found)
    return next(filter(None, reasons), None)


def _reason(loss: Any, shapes: Sequence[tuple[int | None, ...]]) -> str | None:
    if not is_keras_loss(loss) or len(shapes) != 1:
        return f"loss '{loss.name}' may look at several samples at once"
    if loss.reduction in (None, "none"):
        return f"loss '{loss.name}' has reduction={loss.reduction!r}"
    if not treats_samples_apart(loss, shapes[0]):
        return f"loss '{loss.name}' looks at several samples at once"
    return None


def treats_samples_apart(loss: Any, shape: Sequence[int | None]) -> bool:
    """Whether each value of a loss, and its mask, depends on one sample only.

    Some samples are replaced by others: the values of the rest must stay what they are.
    """
    sizes = [_LARGEST if size is None else min(size, _LARGEST) for size in shape[1:]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a loss thinks of made-up data
        found = [_is_apart(loss, *data) for data in _data(sizes)]
    return True in found and False not in found


def _data(sizes: Sequence[int]) -> Iterator[tuple[Array, Array]]:
    """Two batches of outputs, with targets of each kind that some loss takes.

    These are values of any size, values beside zeros and ones, and numbers of classes.
    """
    rng = np.random.default_rng(0)
    y_pred, values = rng.uniform(0.1, 0.9, (2, 2, _ROWS, *sizes))
    yield values, y_pred
    yield np.stack([values[0] > 0.5, values[1]]), y_pred
    if sizes:
        yield np.arange(y_pred[..., 0].size).reshape(y_pred.shape[:-1]) % 2, y_pred


def _is_apart(loss: Any, y: Array, y_pred: Array) -> bool | None:
    """Whether it is for two batches of such data; `None` if it does not take such targets."""

    def values(y: Array, y_pred: Array) -> list[Array]:
        found = [part for part in sample_values(loss, y, y_pred) if part is not None]
        return [np.asarray(keras.ops.convert_to_numpy(part), float) for part in found]

    try:
        # TensorFlow warns on standard error of shapes that do not fit, but not while it traces.
        compute_output_spec(functools.partial(sample_values, loss), *map(_spec, (y[0], y_pred[0])))
        whole = values(y[0], y_pred[0])
        others = values(y[0], y_pred[1])
        mixed = [values(_mix(y, kept), _mix(y_pred, kept)) for kept in (_KEPT, ~_KEPT)]
    except Exception:  # whatever a loss says to targets of another kind
        return None
    if any(part.shape[:1] != (_ROWS,) for part in whole):
        return False
    if not all(map(_equal, whole[1:], others[1:])):  # the mask must follow from the targets
        return False
    return all(
        _equal(before[kept], after[kept])
        for kept, found in zip((_KEPT, ~_KEPT), mixed, strict=True)
        for before, after in zip(whole, found, strict=True)
    )


def _spec(data: Array) -> keras.KerasTensor:
    return keras.KerasTensor(data.shape, str(data.dtype))


def _mix(pair: Array, kept: Array) -> Array:
    """The kept samples of the first batch and the other ones of the second."""
    mixed: Array = np.where(kept.reshape(-1, *[1] * (pair.ndim - 2)), pair[0], pair[1])
    return mixed


def _equal(first: Array, second: Array) -> bool:
    return bool(np.allclose(first, second, rtol=1e-5, atol=1e-6, equal_nan=True))
