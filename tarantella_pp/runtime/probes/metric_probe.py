"""Whether metrics may be updated with parts of a batch one by one, and layers' own: tried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import UNCUT, UnsupportedModelError
from tarantella_pp.internals.functional import layer_metrics
from tarantella_pp.internals.training import made_by_keras
from tarantella_pp.runtime.probes.linearity import following, nonlinear
from tarantella_pp.runtime.probes.parts import (
    ALL,
    MEAN,
    SAME,
    SUM,
    Array,
    Compared,
    PartsProbe,
    Samples,
    apart,
    kinds_of,
    much_larger,
    some_rows,
)
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace
from tarantella_pp.runtime.stage.graph_functions import dense_tensors, flattened
from tarantella_pp.runtime.stage.graph_split import has_effect

# Samples that are tried, one of them and the others; few, for some models have large ones.
_ROWS = 3
# Which of them are not set to zero the second time: of each part another share.
_KEPT = (True, False, True)

_HARMLESS = ("Assert", "CheckNumericsV2")


def why_not_by_parts(
    metrics: Any,
    pack: Callable[[Sequence[tf.Tensor]], Any],
    y: Any,
    outputs: Sequence[tf.TensorSpec],
    weight: Any,
) -> str | None:
    """Tries whether what parts of a batch add to metrics is what the batch adds."""
    rng = np.random.default_rng(0)
    owners = [metric for metric in metrics.metrics for _ in metric.variables]
    try:
        y, weight = (tf.nest.map_structure(lambda t: some_rows(t, _ROWS), s) for s in (y, weight))
        results = [_made_up(spec, y, rng) for spec in outputs]
        examples = (y, results, weight)
        probe = _probe(metrics, pack, examples, owners)
        if isinstance(probe, str):
            return probe
        zeros = tf.nest.map_structure(_with_zeros, (y, weight))
        masked = [  # by other masks
            tf.constant(rng.uniform(size=result.shape) < 0.5) if result.dtype.is_bool else result
            for result in results
        ]
        # What looks at the share of zeros, or of masked values, shows itself the second time.
        for tried in (examples, (zeros[0], masked, zeros[1])):
            found = probe.compare(Samples(_ROWS, dense_tensors(tried)))
            for i, metric in enumerate(owners):
                if not np.all(np.isfinite(found.whole.state[i])):
                    return f"metric '{metric.name}' is no number for made-up outputs"
                if SUM not in found.kinds_of_state(i):
                    return _mixes(metric)
    except Exception as error:  # made-up data may be wrong for it in any way
        return f"the metrics cannot be tried with made-up outputs ({type(error).__name__}: {error})"
    return None


def _mixes(metric: Any) -> str:
    return f"metric '{metric.name}' looks at several samples at once"


def _probe(
    metrics: Any, pack: Callable[[Sequence[tf.Tensor]], Any], examples: Any, owners: Sequence[Any]
) -> PartsProbe | str:
    """Traces the update of the metrics, or says why no trial of it would show enough."""

    def update(y: Any, results: Sequence[tf.Tensor], weight: Any) -> None:
        metrics.update_state(y, pack(results), weight)

    run, specs = flattened(update, examples, any_rows=True)
    traced = tf.function(run, input_signature=specs, autograph=False).get_concrete_function()
    variables = [variable.value for variable in metrics.variables]
    handles = {id(v.handle): metric for v, metric in zip(variables, owners, strict=True)}
    pairs = traced.graph.captures
    own = {inner.op: handles[id(outer)] for outer, inner in pairs if id(outer) in handles}
    effects = [op for op in traced.graph.get_operations() if has_effect(op)]
    writes = [op for op in effects if op.type.startswith("Assign") and op.inputs[0].op in own]
    if any(op not in writes and op.type not in _HARMLESS for op in effects):
        return "a metric does more than to change its own variables"
    inputs = traced.inputs[: len(specs)]
    follows = following(traced.graph, inputs)
    for op in writes:
        metric = own[op.inputs[0].op]
        # Of Keras' own, hinges look at all labels: whether these are 0 and 1, or -1 and 1.
        if not made_by_keras(metric) and nonlinear(op.inputs[1:], follows) is not None:
            return _mixes(metric)  # which may show with other samples only
    return PartsProbe(traced, inputs, [], (writes, variables))


def _made_up(spec: tf.TensorSpec, y: Any, rng: np.random.Generator) -> tf.Tensor:
    """Outputs without two like values; dimensions that vary are as in the targets."""
    known = dense_tensors((y,))[0].shape
    shape = [
        size if size is not None else known[i] if i < len(known) else 2
        for i, size in enumerate(spec.shape)
    ]
    highest = 1.0 if spec.dtype.is_floating else 2.0
    return tf.cast(rng.uniform(0.0, highest, [_ROWS, *shape[1:]]), spec.dtype)


def _with_zeros(tensor: Any) -> Any:
    """The tensor with some samples zero."""
    if tensor is None:
        return None
    return tf.where(tf.reshape(_KEPT, [-1] + [1] * (len(tensor.shape) - 1)), tensor, 0)


def _same(first: Array, second: Array) -> bool:
    """Returns whether two values of a variable differ by rounding at the most."""
    return SAME in kinds_of(0.0, first, [second], [1.0], tolerance=0.0)


def metric_means(trace: ProbeTrace, samples: Samples, num_replicas: int) -> list[Any]:
    """The variables of layers' metrics to which a call adds a mean, or a constant.

    What a micro-batch adds to these counts by its share of the batch. All others come out right by
    themselves: sums over samples, and what parts lead to one after the other, as a maximum. What
    replicas add is added up, so there it must not depend on what was there before.
    """
    named = [
        (variable, metric.name, call.operation.name)
        for call in trace.module.layer.calls
        for metric in layer_metrics(call.operation)
        for variable in metric.variables
    ]
    metrics = list({id(variable): (variable, *names) for variable, *names in named}.values())
    if not metrics:
        return []
    for variable, metric, layer in metrics:
        if trace.reads(variable.value):
            raise UnsupportedModelError(
                f"Layer '{layer}' computes with the value of its metric '{metric}', which changes "
                f"from micro-batch to micro-batch. {UNCUT}."
            )
    variables = [variable.value for variable, *_ in metrics]
    # The first samples only: later ones may be the same once more, in another part.
    first = samples.of(slice(0, _ROWS))
    trials = [_written(trace, variables, first)]
    # What shows nothing while a weight is zero, or samples are alike or small, shows itself later.
    for change in (apart, much_larger):
        with contextlib.suppress(tf.errors.OpError):  # content that a layer does not take
            trials.append(_written(trace, variables, first.changed(change), moved=0.1))
    means = []
    for place, (variable, metric, layer) in enumerate(metrics):
        kinds, adds, runs_on = ALL, True, True
        for found, again, in_turn in trials:
            before, after = found.start[place], found.whole.state[place]
            kinds &= found.kinds_of_state(place)
            adds = adds and _same(again[place], after + (after - before))
            runs_on = runs_on and _same(after, in_turn[place])
        if num_replicas > 1 and not adds:
            raise UnsupportedModelError(
                f"How layer '{layer}' changes its metric '{metric}' depends on what it was, so "
                f"that the num_replicas={num_replicas} replicas cannot add up what each has "
                "measured. Use num_replicas=1, or pass it to `compile(metrics=...)`."
            )
        if SUM in kinds or runs_on:
            continue
        if MEAN not in kinds:
            raise UnsupportedModelError(
                f"Layer '{layer}' updates its metric '{metric}' with something that is neither a "
                "sum nor a mean over samples, so that micro-batches would change it. Use "
                "num_micro_batches=1, or give the metric one value for each sample."
            )
        means.append(variable)
    return means


def _written(
    trace: ProbeTrace, variables: Sequence[tf.Variable], samples: Samples, moved: float = 0.0
) -> tuple[Compared, list[Array], list[Array]]:
    """What is written with samples, once more from there, and with one part after the other."""
    probe, turns = (trace.writing(variables, moved) for _ in range(2))
    found = probe.compare(samples)
    again = probe.run(samples.tensors).state
    for part in samples.in_parts():
        in_turn = turns.run(samples.of(part).tensors).state
    return found, again, in_turn
