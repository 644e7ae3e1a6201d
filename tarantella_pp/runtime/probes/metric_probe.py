"""Whether metrics may be updated with the parts of a batch one by one: tried, not believed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.probes.parts import (
    SAME,
    SUM,
    Array,
    PartsProbe,
    kinds_of,
    rows_of,
    some_rows,
)
from tarantella_pp.runtime.stage.graph_functions import dense_tensors
from tarantella_pp.runtime.stage.graph_split import has_effect

# Samples of each part of the batch that is tried; few, for some models have large ones.
PARTS = (1, 2)
# Which of the samples are not set to zero the second time: of each part another share.
KEPT = (True, False, True)

_HARMLESS = ("Assert", "CheckNumericsV2")


def why_not_by_parts(
    metrics: Any,
    pack: Callable[[Sequence[tf.Tensor]], Any],
    y: Any,
    outputs: Sequence[tf.TensorSpec],
    weight: Any,
) -> str | None:
    """Tries whether what parts of a batch add to metrics is what the batch adds.

    Targets are the batch's, and are tried once more with zeros among them; outputs and masks are
    made up. Nothing changes: neither the metrics nor any other state.
    """
    rows, rng = sum(PARTS), np.random.default_rng(0)
    names = [metric.name for metric in metrics.metrics for _ in metric.variables]
    try:
        y, weight = (tf.nest.map_structure(lambda t: some_rows(t, rows), s) for s in (y, weight))
        results = [_made_up(spec, y, rows, rng) for spec in outputs]
        examples = (y, results, weight)
        probe = _probe(metrics, pack, examples)
        if probe is None:
            return "a metric does more than to change its own variables"
        zeros = tf.nest.map_structure(_with_zeros, (y, weight))
        masked = [_masked(result, rng) for result in results]
        # What looks at the share of zeros, or of masked values, shows itself the second time.
        for tried in (examples, (zeros[0], masked, zeros[1])):
            tensors = dense_tensors(tried)
            found = probe.compare(rows, PARTS, functools.partial(rows_of, tensors))
            for i, name in enumerate(names):
                if not np.all(np.isfinite(found.whole.state[i])):
                    return f"metric '{name}' is no number for made-up outputs"
                if SUM not in found.kinds_of_state(i):
                    return f"metric '{name}' looks at several samples at once"
    except Exception as error:  # made-up data may be wrong for it in any way
        return f"the metrics cannot be tried with made-up outputs ({type(error).__name__}: {error})"
    return None


def _probe(
    metrics: Any, pack: Callable[[Sequence[tf.Tensor]], Any], examples: Any
) -> PartsProbe | None:
    """Traces the update of the metrics; `None` if it does anything else."""

    def run(*tensors: tf.Tensor) -> None:
        given = iter(tensors)
        filled = [None if t is None else next(given) for t in tf.nest.flatten(examples)]
        y, results, weight = tf.nest.pack_sequence_as(examples, filled)
        metrics.update_state(y, pack(results), weight)

    specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in dense_tensors(examples)]
    traced = tf.function(run, input_signature=specs, autograph=False).get_concrete_function()
    variables = [variable.value for variable in metrics.variables]
    handles = {id(variable.handle) for variable in variables}
    own = {inner.op for outer, inner in traced.graph.captures if id(outer) in handles}
    effects = [op for op in traced.graph.get_operations() if has_effect(op)]
    writes = [op for op in effects if op.type.startswith("Assign") and op.inputs[0].op in own]
    if any(op not in writes and op.type not in _HARMLESS for op in effects):
        return None
    return PartsProbe(traced, traced.inputs[: len(specs)], [], writes, variables)


def _made_up(spec: tf.TensorSpec, y: Any, rows: int, rng: np.random.Generator) -> tf.Tensor:
    """Outputs without two like values; dimensions that vary are as in the targets."""
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


def same(first: Array, second: Array) -> bool:
    """Returns whether two values of a variable differ by rounding at the most."""
    return SAME in kinds_of(0.0, first, [second], [1.0], tolerance=0.0)
