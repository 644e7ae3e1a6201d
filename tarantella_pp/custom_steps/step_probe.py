"""How what a step computes of a batch follows from what it computes of parts, found by trying.

    samples     0 1 2 3 4 5 ...            gradients, logs and all that the step writes
    whole       x x x x x x    -->  g      are means or sums over the parts, or the same,
    parts       x x            -->  a      or the step would train otherwise on shares
                    x x x x    -->  b      of a batch than on all of it

No weight is updated, and what the step itself writes is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.custom_steps.step_trace import StepTrace
from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.probes.parts import (
    ALL,
    MEAN,
    ROWS,
    SAME,
    SUM,
    Compared,
    Outcome,
    PartsProbe,
    chosen,
    chosen_together,
    kinds_of,
    opposite,
    smaller,
    some_rows,
    thirds,
)
from tarantella_pp.runtime.stage.graph_split import has_effect

# Thirds in the parts of each trial: as they are, changed, and changed in another way.
PARTS = ((1, 2), (2, 1), (1, 2))
# Samples of a trial. Those of a batch, as far as there are so many: a step may treat some samples
# in another way, such as those of a rare class.
LEAST_ROWS, MOST_ROWS = 6, 48
# Of scaled losses: the first with which all gradients are finite is tried.
_WEIGHTS = (1.0, 2.0**-8, 2.0**-16)

Array = np.ndarray[Any, Any]

_OTHERWISE = (
    "Tried before training with samples of the first batch, those of a third and of the rest do "
    "not make it up: it is neither a mean nor a sum over the samples, so replicas with a share of "
    "the batch each would train otherwise than one process."
)


@dataclass(frozen=True)
class StepKinds:
    """The kind of each value, as all replicas know it."""

    gradients: dict[tuple[int, int], str]  # by update and by variable
    # By position among what the step returns; what metrics give is not among them
    results: dict[int, str]
    state: dict[int, str]  # by `id` of a variable that the step writes
    # What a step adds to a variable that counts random numbers, by its `id`
    drawn: dict[int, Array]
    # Whether scaled losses are weighted with a replica's share of the samples. Their gradients are
    # then sums over the replicas
    weighted: bool
    # The gradients, by update and by variable, with slices at the same places whatever the samples
    # are
    fixed: frozenset[tuple[int, int]]

    @classmethod
    def told(cls, trace: StepTrace, found: Sequence[Any]) -> StepKinds:
        """Makes them of what `found_kinds` returned on the rank that has tried."""
        gradients, results, state, drawn, weighted, fixed = found
        written = trace.written
        return cls(
            {(number, i): kind for number, i, kind in gradients},
            dict(results),
            {id(variable): kind for variable, kind in zip(written, state, strict=True)},
            {id(written[i]): np.reshape(n, tuple(written[i].shape)) for i, n in drawn},
            weighted,
            frozenset((number, i) for number, i in fixed),
        )


class StepProbe:
    """Tries a traced step out.

    Attributes:
        gradients: The kinds that each gradient may be of, by update and by variable.
        results: Those of each value that the step returns.
        state: Those of each variable that it writes.
        drawn: What a step adds to each variable that counts random numbers, by its position.
        weighted: The updates all of whose gradients are weighted as the trace is asked to weight
            scaled losses; none if that changes anything else.
        fixed: The gradients with slices at the same places whatever the samples are.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self.gradients = {
            (number, i): ALL
            for number, update in enumerate(trace.updates)
            for i, parts in enumerate(update.gradients)
            if parts
        }
        self.results = dict.fromkeys(range(len(trace.outputs)), ALL)
        self.state = dict.fromkeys(range(len(trace.written)), ALL)
        self.drawn: dict[int, list[float]] = {}
        self.weighted: frozenset[int] = frozenset()
        self.fixed: list[tuple[int, int]] = []
        effects = [op for op in trace.graph.get_operations() if has_effect(op)]
        wanted = [tensor for update in trace.updates for tensor in update.tensors]
        fetches = [*wanted, *trace.outputs]
        keys = [
            (n, i, k)
            for n, u in enumerate(trace.updates)
            for i, parts in enumerate(u.gradients)
            for k in range(len(parts))
        ]
        # Where the indices of slices are among what is fetched: they come second.
        self._indices = {place: (n, i) for place, (n, i, k) in enumerate(keys) if k == 1}
        self._probe = PartsProbe(trace.function, trace.inputs, fetches, effects, trace.written)

    def run(self, tensors: Sequence[tf.Tensor]) -> None:
        """Tries the step with samples of a batch, as they are and changed."""
        given = max((int(tensor.shape[0]) for tensor in tensors), default=0)
        rows = min(max(given // 3 * 3, LEAST_ROWS), MOST_ROWS)
        samples = [some_rows(tensor, rows) for tensor in tensors]
        before = self._probe.state()
        try:
            self.weighted = self._try_weights(samples)
            self._compare(samples, rows, PARTS[0])
            # What depends on what there was before shows itself the second time.
            for sizes, change in zip(PARTS[1:], (smaller, opposite), strict=True):
                with contextlib.suppress(tf.errors.OpError):  # content that it does not take
                    self._compare([change(tensor) for tensor in samples], rows, sizes)
                self._probe.restore(before)
        finally:
            self._trace.weight.assign(1.0)
            self._probe.restore(before)

    def _compare(self, samples: Sequence[tf.Tensor], rows: int, sizes: Sequence[int]) -> None:
        """Runs the whole and its parts, and takes in what it shows."""
        found = self._probe.compare(
            rows, thirds(rows, sizes), lambda own: [t[own] for t in samples]
        )
        self.fixed = [key for place, key in self._indices.items() if SAME in found.kinds(place)]
        gradients, results, state = self._kinds(found)
        self.gradients = {key: found & gradients[key] for key, found in self.gradients.items()}
        self.results = {key: found & results[key] for key, found in self.results.items()}
        self.state = {key: found & state[key] for key, found in self.state.items()}
        for i in self._probe.counters():
            moved = found.whole.state[i].astype(float) - found.start[i]
            self.drawn[i] = moved.ravel().tolist()

    def _kinds(self, found: Compared) -> tuple[Any, list[frozenset[str]], list[frozenset[str]]]:
        """The kinds of gradients, results and state in one trial."""
        whole, *parts = [self._dense(trial) for trial in (found.whole, *found.parts)]
        sizes = {key: np.max(np.abs(g), initial=0.0) for key, g in whole.items()}
        gradients = {}
        for key, gradient in whole.items():
            most = max(size for (number, _), size in sizes.items() if number == key[0])
            each = [part[key] for part in parts]
            shares, tolerance = found.shares, found.tolerance
            gradients[key] = kinds_of(0.0, gradient, each, shares, tolerance, float(most))
        count = len(found.whole.values)
        results = [found.kinds(i) for i in range(count - len(self.results), count)]
        return gradients, results, [found.kinds_of_state(i) for i in self.state]

    def _dense(self, trial: Outcome) -> dict[tuple[int, int], Array]:
        """Gradients as arrays, slices among them."""
        values, found = iter(trial.values), {}
        for number, update in enumerate(self._trace.updates):
            for i, tensors in enumerate(update.gradients):
                parts = [next(values) for _ in tensors]
                if len(parts) == 2:
                    dense = np.zeros(tuple(update.variables[i].shape), np.float64)
                    np.add.at(dense, parts[1], parts[0])
                    parts = [dense]
                if parts:
                    found[number, i] = parts[0]
        return found

    def _try_weights(self, samples: Sequence[tf.Tensor]) -> frozenset[int]:
        """Finds `weighted`; leaves a weight with which scaled losses have finite gradients.

        With half of the weight a gradient must be half as large, as if it were that of one of two
        equal parts that are added up.
        """
        if not self._trace.is_weighted:
            return frozenset()
        start = self._probe.state()
        for weight in _WEIGHTS:
            self._trace.weight.assign(weight)
            whole = self._probe.trial(samples)
            self._probe.restore(start)
            if all(np.isfinite(gradient).all() for gradient in self._dense(whole).values()):
                break
        self._trace.weight.assign(weight / 2)
        halves = [self._probe.trial(samples)] * 2
        self._trace.weight.assign(weight)
        self._probe.restore(start)
        compared = Compared(start, whole, halves, [0.5, 0.5], self._probe.tolerance)
        gradients, *others = self._kinds(compared)
        weighted = set()
        for number in {number for number, _ in gradients}:
            own = [kinds for (other, _), kinds in gradients.items() if other == number]
            follows = all(SUM in kinds for kinds in own)
            if follows == all(SAME in kinds for kinds in own):  # neither, or nothing but zeros
                return frozenset()
            if follows:
                weighted.add(number)
        alone = all(SAME in kinds for found in others for kinds in found)
        return frozenset(weighted) if alone else frozenset()


def found_kinds(
    trace: StepTrace, tensors: Sequence[tf.Tensor], what: str, by_rows: bool = False
) -> list[Any]:
    """Tries a step, and chooses how to combine its values."""
    probe = StepProbe(trace)
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
        probe.fixed,
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
    """Refuses predictions that do not consist of the predictions of some samples."""
    for i, kinds in probe.results.items():
        if ROWS not in kinds:
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
