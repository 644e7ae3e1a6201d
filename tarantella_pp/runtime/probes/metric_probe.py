"""Whether metrics may be updated with the parts of a batch one by one: tried, not believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.probes.parts import some_rows
from tarantella_pp.runtime.stage.graph_functions import dense_tensors

# Samples of each part of the batch that is tried; few, for some models have large ones.
PARTS = (1, 2)
# Which of the samples are not set to zero the second time: of each part another share.
KEPT = (True, False, True)
# Units of rounding, of the largest number of a variable, that count as no difference.
ROUNDING = 64

State = list[tf.Tensor]
Update = Callable[[State, Sequence[tf.Tensor]], State]
_HARMLESS = ("ReadVariableOp", "Assert", "CheckNumericsV2")


def why_not_by_parts(
    metrics: Any,
    pack: Callable[[Sequence[tf.Tensor]], Any],
    y: Any,
    outputs: Sequence[tf.TensorSpec],
    weight: Any,
    replicas: bool = False,
) -> str | None:
    """Tries whether metrics end in the same state with a batch and with its parts.

    The targets that are tried are those of the batch, and once more with zeros among them; outputs
    and masks are made up. Nothing changes: neither the metrics nor any other state.
    """
    rows = sum(PARTS)
    rng = np.random.default_rng(0)
    try:
        y, weight = (tf.nest.map_structure(lambda t: some_rows(t, rows), s) for s in (y, weight))
        results = [_made_up(spec, y, rows, rng) for spec in outputs]
        examples = (y, results, weight)
        update = _pure_update(metrics, pack, examples)
        if update is None:
            return "a metric does more than to change its own variables"
        state = [tf.convert_to_tensor(v.value) for v in metrics.variables]
        with_zeros = tf.nest.map_structure(_with_zeros, (y, weight))
        masked = [_masked(result, rng) for result in results]
        # What looks at the share of zeros, or of what is masked, shows itself the second time.
        for tried in (examples, (with_zeros[0], masked, with_zeros[1])):
            tensors = dense_tensors(tried)
            whole, parted = update(state, tensors), _by_parts(update, state, tensors)
            names = [metric.name for metric in metrics.metrics for _ in metric.variables]
            for name, once, by_parts in zip(names, whole, parted, strict=True):
                if not np.all(np.isfinite(once.numpy())):
                    return f"metric '{name}' is no number for made-up outputs"
                if not same(once.numpy(), by_parts.numpy()):
                    return f"metric '{name}' looks at several samples at once"
            added_up = _added_up(update, state, tensors) if replicas else whole
            for name, once, total in zip(names, whole, added_up, strict=True):
                if not same(once.numpy(), total.numpy()):
                    return f"metric '{name}' is not the sum of what replicas count"
            state = whole
    except Exception as error:  # made-up data may be wrong for it in any way
        return f"the metrics cannot be tried with made-up outputs ({type(error).__name__}: {error})"
    return None


def _pure_update(
    metrics: Any, pack: Callable[[Sequence[tf.Tensor]], Any], examples: Any
) -> Update | None:
    """The update of the metrics as a function of their state; `None` if it has side effects."""
    structure, count = examples, len(metrics.variables)

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        given = iter(tensors[count:])
        filled = [None if t is None else next(given) for t in tf.nest.flatten(structure)]
        y, results, weight = tf.nest.pack_sequence_as(structure, filled)
        state = metrics.stateless_update_state(list(tensors[:count]), y, pack(results), weight)
        return [tf.convert_to_tensor(value) for value in state]

    specs = [tf.TensorSpec(v.shape, v.dtype) for v in metrics.variables]
    specs += [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in dense_tensors(examples)]
    traced = tf.function(run, input_signature=specs, autograph=False).get_concrete_function()
    operations = traced.graph.get_operations()
    if any(op.op_def.is_stateful and op.type not in _HARMLESS for op in operations):
        return None
    return lambda state, tensors: list(traced(*state, *tensors))


def _by_parts(update: Update, state: State, tensors: Sequence[tf.Tensor]) -> State:
    for pieces in zip(*(tf.split(tensor, PARTS) for tensor in tensors), strict=True):
        state = update(state, pieces)
    return state


def _added_up(update: Update, state: State, tensors: Sequence[tf.Tensor]) -> State:
    """The state after the first part, and the sum of what all others make of zeros."""
    first, *others = zip(*(tf.split(tensor, PARTS) for tensor in tensors), strict=True)
    total = update(state, first)
    for pieces in others:
        theirs = update([tf.zeros_like(variable) for variable in state], pieces)
        total = [a + b for a, b in zip(total, theirs, strict=True)]
    return total


def _made_up(spec: tf.TensorSpec, y: Any, rows: int, rng: np.random.Generator) -> tf.Tensor:
    """Outputs of which nothing is alike; dimensions that vary are those of the targets."""
    known = dense_tensors((y,))[0].shape
    shape = [
        size if size is not None else known[i] if i < len(known) else 2
        for i, size in enumerate(spec.shape)
    ]
    highest = 1.0 if spec.dtype.is_floating else 2.0
    return tf.cast(rng.uniform(0.0, highest, [rows, *shape[1:]]), spec.dtype)


def _masked(result: tf.Tensor, rng: np.random.Generator) -> tf.Tensor:
    """Another mask in the place of a mask."""
    if result.dtype != tf.bool:
        return result
    return tf.constant(rng.uniform(size=result.shape) < 0.5)


def _with_zeros(tensor: Any) -> Any:
    """The tensor with some samples zero."""
    if tensor is None:
        return None
    return tf.where(tf.reshape(KEPT, [-1] + [1] * (len(tensor.shape) - 1)), tensor, 0)


def same(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Returns whether two values of a variable differ by rounding at the most."""
    if first.dtype.kind in "iub":
        return bool(np.array_equal(first, second))
    unit = ml_dtypes.finfo(first.dtype).eps
    a, b = first.astype(np.float64), second.astype(np.float64)
    largest = np.max(np.abs(a), initial=0.0)
    return bool(np.all(np.abs(a - b) <= ROUNDING * unit * largest))
