"""How what a step computes of a batch follows from what it computes of parts, found by trying.

    samples     0 1 2 3 4 5 ...            gradients, logs and all that the step writes
    whole       x x x x x x    -->  g      are means or sums over the parts, or the same,
    parts       x x            -->  a      or the step would train otherwise on shares
                    x x x x    -->  b      of a batch than on all of it

Nothing is updated or written. What behaves otherwise with other data only, such as clipping that
these samples do not reach, is looked for in the graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tarantella_pp.custom_steps.step_trace import StepTrace, Update
from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.probes.linearity import is_zero, nonlinear, uses_of_sums
from tarantella_pp.runtime.probes.parts import (
    ALL,
    MEAN,
    ROWS,
    SAME,
    SUM,
    Compared,
    PartsProbe,
    chosen,
    chosen_together,
    much_larger,
    opposite,
    rows_of,
    smaller,
    some_rows,
    thirds,
)
from tarantella_pp.runtime.stage.graph_split import has_effect

# Thirds in the parts of each trial: as they are, changed, and changed in another way.
_PARTS = ((1, 2), (2, 1), (1, 2))
# Bounds of the samples of a trial, else as many as the batch has: a step may treat some samples,
# such as a rare class, in another way.
_LEAST_ROWS, _MOST_ROWS = 6, 48
# How far weights are moved where gradients are all zero.
_DISTURBED = (1.0, 1e3)

_OTHERWISE = (
    "Tried before training with samples of the first batch, those of a third and of the rest do "
    "not make it up: it is neither a mean nor a sum over the samples, so replicas with a share of "
    "the batch each would train otherwise than one process."
)
_CLIP = (
    "Clip with the optimizer's clipnorm, global_clipnorm or clipvalue, which see the whole batch, "
    "or train in one process."
)


class StepKinds(NamedTuple):
    """How each value of a batch follows from the replicas' values; the same on all of them."""

    gradients: list[list[str | None]]  # by update and variable
    # By update the variables whose slices are at the same places whatever the samples are
    fixed: list[list[int]]
    results: list[str]  # by position among what the step returns
    state: list[str]  # by position among the variables that the step writes
    # The positions of those that count random numbers, and what a step adds to each
    drawn: list[tuple[int, list[float]]]


class StepProbe:
    """Tries a traced step out.

    Attributes:
        gradients: The kinds that each gradient may be of, by update and by variable.
        results: Those of each value that the step returns.
        state: Those of each variable that it writes.
        drawn: What a step adds to each variable that counts random numbers, by its position.
        fixed: The gradients with slices at the same places whatever the samples are.
        finite: The updates all of whose gradients were numbers in some trial.
    """

    def __init__(self, trace: StepTrace) -> None:
        updates = trace.updates
        keys = [
            (n, i) for n, u in enumerate(updates) for i, g in enumerate(u.dense) if g is not None
        ]
        self._sparse = [(n, i) for n, i in keys if len(updates[n].gradients[i]) == 2]
        self.gradients = dict.fromkeys(keys, ALL)
        self.results = [ALL] * len(trace.outputs)
        self.state = [ALL] * len(trace.written)
        self.drawn: dict[int, list[float]] = {}
        self.fixed = set(self._sparse)
        self.finite: set[int] = set()
        dense = [updates[n].dense[i] for n, i in keys]
        indices = [updates[n].gradients[i][1] for n, i in self._sparse]
        effects = [op for op in trace.graph.get_operations() if has_effect(op)]
        fetches = [*dense, *indices, *trace.outputs]
        self._made = functools.partial(
            PartsProbe, trace.function, trace.inputs, fetches, effects, trace.written
        )
        self._probe = self._made()

    def run(self, tensors: Sequence[tf.Tensor]) -> None:
        """Tries the step with samples of a batch, as they are and changed."""
        given = max((int(tensor.shape[0]) for tensor in tensors), default=0)
        rows = min(given // 3 * 3 or _LEAST_ROWS, _MOST_ROWS)
        samples = [some_rows(tensor, rows) for tensor in tensors]
        self._compare(samples, rows, _PARTS[0])
        # What depends on what there was before shows itself from the second time on.
        for sizes, change in zip(_PARTS[1:], (smaller, opposite), strict=True):
            with contextlib.suppress(tf.errors.OpError):  # content that it does not take
                self._compare([change(tensor) for tensor in samples], rows, sizes)
        for disturbed in _DISTURBED:
            if not self.unknown():
                break
            with contextlib.suppress(tf.errors.OpError):
                other = [much_larger(tensor) for tensor in samples]
                probe = self._made(disturbed=disturbed)
                parts = functools.partial(rows_of, other)
                self._take_gradients(probe.compare(rows, thirds(rows), parts))

    def unknown(self) -> set[int]:
        """The updates whose gradients have been zero in all trials."""
        known = {
            number for (number, _), kinds in self.gradients.items() if not kinds >= {MEAN, SUM}
        }
        return {number for number, _ in self.gradients} - known

    def _compare(self, samples: Sequence[tf.Tensor], rows: int, sizes: Sequence[int]) -> None:
        """Runs the whole and its parts, and takes in what it shows."""
        given = functools.partial(rows_of, samples)
        found = self._probe.compare(rows, thirds(rows, sizes), given)
        places = self._take_gradients(found)
        self.fixed -= {key for key in self._sparse if SAME not in found.kinds(next(places))}
        self.results = [kinds & found.kinds(next(places)) for kinds in self.results]
        self.state = [kinds & found.kinds_of_state(i) for i, kinds in enumerate(self.state)]
        for i in self._probe.counters():
            moved = found.whole.state[i].astype(float) - found.start[i]
            self.drawn[i] = moved.ravel().tolist()

    def _take_gradients(self, found: Compared) -> Iterator[int]:
        """Takes in what a trial shows of the gradients; returns the places of all else."""
        sizes_of: dict[int, list[float]] = {}  # of the gradients of each update
        for (number, _), gradient in zip(self.gradients, found.whole.values, strict=False):
            sizes_of.setdefault(number, []).append(float(np.max(np.abs(gradient), initial=0.0)))
        self.finite |= {number for number, each in sizes_of.items() if np.isfinite(each).all()}
        largest = {n: max(filter(np.isfinite, each), default=0.0) for n, each in sizes_of.items()}
        places = iter(range(len(found.whole.values)))
        for key in self.gradients:
            self.gradients[key] &= found.kinds(next(places), largest[key[0]])
        return places


def found_kinds(
    trace: StepTrace, tensors: Sequence[tf.Tensor], what: str, by_rows: bool = False
) -> StepKinds:
    """Tries a step, and chooses how to combine its values."""
    probe = StepProbe(trace)
    probe.run(tensors)
    gradients, fixed = [], []
    for number, update in enumerate(trace.updates):
        kinds = chosen_together({i: k for (n, i), k in probe.gradients.items() if n == number})
        strange = [update.variables[i].path for i, kind in kinds.items() if kind is None]
        if strange:
            raise UnsupportedModelError(
                f"The gradients that {what} applies with optimizer '{update.optimizer.name}' mix "
                f"samples: that of '{strange[0]}' and {len(strange) - 1} more. {_OTHERWISE} "
                "Compute a loss that is a mean (or a sum) of one value for each sample. "
                f"{_CLIP}"
            )
        if kinds and number not in probe.finite:
            raise UnsupportedModelError(
                f"The gradients that {what} applies with optimizer '{update.optimizer.name}' are "
                "not finite for samples of the first batch, so it is not known whether they are a "
                "mean or a sum over samples. Begin with a smaller loss scale, or train in one "
                "process."
            )
        if number in probe.unknown() and not _of_weights(trace, update):
            raise UnsupportedModelError(
                f"The gradients that {what} applies with optimizer '{update.optimizer.name}' are "
                "zero for samples of the first batch, also with other weights, so it is not known "
                "whether they are a mean or a sum over samples. Leave the update out where its "
                "loss does not count, or train in one process."
            )
        bent = nonlinear([t for t in update.dense if t is not None], trace.of_samples)
        if bent is not None:
            raise UnsupportedModelError(
                f"The gradients that {what} applies with optimizer '{update.optimizer.name}' do "
                f"not follow linearly from a sum or mean over samples (operation '{bent.name}', "
                f"{bent.type}), so replicas with a share of the batch each would train otherwise "
                f"than one process. {_CLIP}"
            )
        gradients.append([kinds.get(i) for i in range(len(update.variables))])
        fixed.append([i for n, i in sorted(probe.fixed) if n == number])
    if by_rows:
        _check_rows(trace, probe, what)
    return StepKinds(
        gradients,
        fixed,
        [] if by_rows else _results(trace, probe, what),
        _state(trace, probe, what),
        list(probe.drawn.items()),
    )


def _of_weights(trace: StepTrace, update: Update) -> bool:
    """Whether gradients follow from weights alone, or are zero whatever the samples are."""
    dense = [t for t in update.dense if t is not None]
    return all(t.op not in trace.of_samples or is_zero(t) for t in dense)


def _results(trace: StepTrace, probe: StepProbe, what: str) -> list[str]:
    found = []
    for i, kinds in enumerate(probe.results):
        kind: str | None = SAME
        if i not in trace.of_variables:
            bent = nonlinear([trace.outputs[i]], trace.of_samples)
            kind = chosen(kinds, (MEAN, SUM, SAME)) if bent is None else None
        if kind is None:
            raise UnsupportedModelError(
                f"What {what} returns as '{trace.names[i]}' mixes samples. {_OTHERWISE} Return "
                "what a keras.metrics.Metric gives as its result, updated in the step, or a mean "
                "over the samples."
            )
        found.append(kind)
    return found


def _check_rows(trace: StepTrace, probe: StepProbe, what: str) -> None:
    """Refuses predictions that do not consist of the predictions of some samples."""
    for name, kinds, rows in zip(trace.names, probe.results, trace.outputs, strict=True):
        if ROWS not in kinds or any(uses_of_sums([rows], trace.of_samples)):
            raise UnsupportedModelError(
                f"What {what} returns{f' as {name!r}' if name else ''} does not have one row or "
                "more for each sample that follows from that sample alone, so the predictions of "
                "replicas do not make it up. Predict in one process."
            )


def _state(trace: StepTrace, probe: StepProbe, what: str) -> list[str]:
    found = []
    updated = {v.value.ref() for update in trace.updates for v in update.variables}
    for i, kinds in enumerate(probe.state):
        variable = trace.written[i]
        order: tuple[str, ...] = (SAME, SUM, MEAN)
        if i in probe.drawn or variable.ref() in updated:
            order = (SAME,)
        if trace.is_of_samples(variable):  # which may show with other samples only
            order = tuple(kind for kind in order if kind != SAME)
        kind = None if trace.bends(variable) else chosen(kinds, order)
        if kind is None:
            raise UnsupportedModelError(
                f"{what} writes '{trace.written[i].name}' with what mixes samples. {_OTHERWISE} "
                "Keep it in a metric that adds up, such as keras.metrics.Mean, or leave it out."
            )
        found.append(kind)
    return found
