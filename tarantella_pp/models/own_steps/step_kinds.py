"""What replicas have to do with each value of a step, or why they cannot run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.models.own_steps.step_probe import StepProbe
from tarantella_pp.models.own_steps.step_trace import StepTrace
from tarantella_pp.models.own_steps.value_kinds import MEAN, SAME, SUM, chosen, chosen_together

_OTHERWISE = (
    "Tried before training with samples of the first batch, those of a third and of the rest do "
    "not make it up: it is neither a mean nor a sum over the samples, so replicas with a share of "
    "the batch each would train otherwise than one process."
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StepKinds:
    """The kind of each value, as all replicas know it.

    Attributes:
        gradients: By update and by variable.
        results: By position among what the step returns; what metrics give is not among them.
        state: By `id` of a variable that the step writes.
        drawn: What a step adds to a variable that counts random numbers, by its `id`.
        weighted: Whether scaled losses are weighted with a replica's share of the samples. Their
            gradients are then sums over the replicas.
    """

    gradients: dict[tuple[int, int], str]
    results: dict[int, str]
    state: dict[int, str]
    drawn: dict[int, Array]
    weighted: bool

    @classmethod
    def told(cls, trace: StepTrace, found: Sequence[Any]) -> StepKinds:
        """Makes them of what `found_kinds` returned on the rank that has tried."""
        gradients, results, state, drawn, weighted = found
        written = trace.written
        return cls(
            {(number, i): kind for number, i, kind in gradients},
            dict(results),
            {id(variable): kind for variable, kind in zip(written, state, strict=True)},
            {id(written[i]): np.reshape(n, tuple(written[i].shape)) for i, n in drawn},
            weighted,
        )


def found_kinds(
    trace: StepTrace, tensors: Sequence[tf.Tensor], what: str, by_rows: bool = False
) -> list[Any]:
    """Tries a step, and chooses what is to be done with its values."""
    probe = StepProbe(trace, by_rows)
    probe.run(tensors)
    gradients: dict[tuple[int, int], str | None] = {}
    for number, update in enumerate(trace.updates):
        own = {i: kinds for (n, i), kinds in probe.gradients.items() if n == number}
        kinds = chosen_together(own)
        strange = [update.variables[i].path for i, kind in kinds.items() if kind is None]
        if strange:
            raise UnsupportedModelError(
                f"The gradients that {what} applies with optimizer '{update.optimizer.name}' mix "
                f"samples: that of '{strange[0]}' and {len(strange) - 1} more. {_OTHERWISE} "
                "Compute a loss that is a mean (or a sum) of one value for each sample, or train "
                "in one process."
            )
        gradients |= {(number, i): kind for i, kind in kinds.items()}
    if by_rows:
        _check_rows(trace, probe, what)
    weighted = {key: kind for key, kind in gradients.items() if key[0] in probe.weighted}
    if all(kind == MEAN for kind in weighted.values()):
        gradients |= dict.fromkeys(weighted, SUM)
    else:  # what is added up over the samples has no share
        weighted = {}
    return [
        [[*key, kind] for key, kind in gradients.items()],
        [] if by_rows else _results(trace, probe, what),
        _state(trace, probe, what),
        [[i, steps] for i, steps in probe.drawn.items()],
        bool(weighted),
    ]


def _results(trace: StepTrace, probe: StepProbe, what: str) -> list[list[Any]]:
    found = []
    for i, kinds in probe.results.items():
        kind = chosen(kinds, (MEAN, SUM, SAME))
        if i in trace.metric_logs:
            continue
        if kind is None:
            raise UnsupportedModelError(
                f"What {what} returns as '{trace.names[i]}' mixes samples. {_OTHERWISE} Return "
                "what a keras.metrics.Metric gives as its result, updated in the step, or a mean "
                "over the samples."
            )
        found.append([i, kind])
    return found


def _check_rows(trace: StepTrace, probe: StepProbe, what: str) -> None:
    """Refuses predictions that those of some samples do not make up."""
    for i, kinds in probe.results.items():
        if SAME not in kinds or not trace.outputs[i].shape.rank:
            raise UnsupportedModelError(
                f"What {what} returns{f' as {trace.names[i]!r}' if trace.names[i] else ''} does "
                "not have one row or more for each sample that follows from that sample alone, so "
                "the predictions of replicas do not make it up. Predict in one process."
            )


def _state(trace: StepTrace, probe: StepProbe, what: str) -> list[str]:
    found = []
    for i, kinds in probe.state.items():
        kind = chosen(kinds, (SAME,) if i in probe.drawn else (SAME, SUM, MEAN))
        if kind is None:
            raise UnsupportedModelError(
                f"{what} writes '{trace.written[i].name}' with what mixes samples. {_OTHERWISE} "
                "Keep it in a metric that adds up, such as keras.metrics.Mean, or leave it out."
            )
        found.append(kind)
    return found
