"""How metrics that layers update when they are called follow from micro-batches: tried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.functional import layer_metrics
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.probes.metric_probe import PARTS, same
from tarantella_pp.runtime.probes.parts import MEAN, SUM, Array, PartsProbe
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace, Samples


def metric_means(
    calls: Sequence[Call], trace: ProbeTrace, samples: Samples, num_replicas: int
) -> list[Any]:
    """The variables of layers' metrics to which a call adds a mean, or a constant.

    What a micro-batch adds to these counts by its share of the batch. All others come out right by
    themselves: sums over samples, and what parts lead to one after the other, as a maximum. What
    replicas add is added up, so there it must not depend on what was there before.
    """
    named = [
        (variable, metric.name, call.operation.name)
        for call in calls
        for metric in layer_metrics(call.operation)
        for variable in metric.variables
    ]
    metrics = list({id(variable): (variable, *names) for variable, *names in named}.values())
    if not metrics:
        return []
    variables = [variable.value for variable, *_ in metrics]
    probe, rows = trace.writing(variables), sum(PARTS)
    # The first samples only: later ones may be the same once more, in another part.
    found = probe.compare(rows, PARTS, samples.of)
    more = probe.compare(rows, PARTS, samples.of)  # once more, from where the whole has led
    in_turn = _one_after_the_other(trace.writing(variables), samples)
    means = []
    for place, (variable, metric, layer) in enumerate(metrics):
        before, after = found.start[place], found.whole.state[place]
        if num_replicas > 1 and not same(more.whole.state[place], after + (after - before)):
            raise UnsupportedModelError(
                f"How layer '{layer}' changes its metric '{metric}' depends on what it was, so "
                f"that the num_replicas={num_replicas} replicas cannot add up what each has "
                "measured. Use num_replicas=1, or pass it to `compile(metrics=...)`."
            )
        kinds = found.kinds_of_state(place)
        if SUM in kinds or same(after, in_turn[place]):
            continue
        if MEAN not in kinds:
            raise UnsupportedModelError(
                f"Layer '{layer}' updates its metric '{metric}' with something that is neither a "
                "sum nor a mean over samples, so that micro-batches would change it. Use "
                "num_micro_batches=1, or give the metric one value for each sample."
            )
        means.append(variable)
    return means


def _one_after_the_other(probe: PartsProbe, samples: Samples) -> list[Array]:
    """What the variables are after the first samples and then those behind them."""
    begin = PARTS[0]
    probe.compare(begin, [begin], samples.of)
    size = PARTS[1]
    last = probe.compare(size, [size], lambda rows: samples.of(_moved(rows, begin)))
    return last.whole.state


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
