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
import itertools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tarantella_pp.cause import describe
from tarantella_pp.custom_steps.step_trace import StepTrace
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
    Samples,
    apart,
    chosen,
    chosen_together,
    much_larger,
    opposite,
    rows_read,
    smaller,
    some_rows,
)
from tarantella_pp.runtime.stage.graph_split import has_effect

# The trials besides the samples as they are: changed, and in parts of other sizes.
_CHANGES = ((smaller, (2, 1)), (opposite, (1, 2)))
# Bounds of the samples of a trial, else as many as the batch has: a step may treat some samples,
# such as a rare class, in another way.
_LEAST_ROWS, _MOST_ROWS = 6, 48
# And with weights that are moved so far: terms may be zero at first, or count later. Much larger
# ones only where something has shown nothing.
_MOVED = ((apart, 0.1), (much_larger, 1.0), (much_larger, 1e3))

_ADVICE = (
    "Compute a loss that is a mean of one value for each sample (or a sum, without other terms). "
    "Clip with the optimizer's clipnorm, global_clipnorm or clipvalue, which see the whole batch, "
    "or train in one process."
)
_NEITHER = "neither a mean nor a sum over the samples of the first batch"


class StepKinds(NamedTuple):
    """How each value of a batch follows from the replicas' values; the same on all of them."""

    gradients: list[list[str | None]]  # by update and variable
    # By update and sparse gradient: whether each lookup reads the same rows for all samples
    fixed: list[dict[int, list[bool]]]
    results: list[str]  # by position among what the step returns
    state: list[str]  # by position among the variables that the step writes
    # The positions of those that count random numbers, and what a step adds to each
    drawn: list[tuple[int, list[float]]]


class StepProbe:
    """Tries a traced step out, and finds the kinds that each value may be of."""

    def __init__(self, trace: StepTrace) -> None:
        updates = trace.updates
        dense = {
            (n, i): g for n, u in enumerate(updates) for i, g in enumerate(u.dense) if g is not None
        }
        self._lookups = [
            (n, i, tensor, tensor.op in trace.of_samples)
            for n, update in enumerate(updates)
            for i, tensors in update.gradients.lookups.items()
            for tensor in tensors
        ]
        self.gradients = dict.fromkeys(dense, ALL)
        self.results = [ALL] * len(trace.outputs)
        self.state = [ALL] * len(trace.written)
        # What a step adds to each variable that counts random numbers, by its position
        self.drawn: dict[int, list[float]] = {}
        self.counters: dict[int, set[bool]] = {}  # and whether what it draws has shapes of samples
        # What each lookup reads in each trial
        self._reads: list[set[str | None]] = [set() for _ in self._lookups]
        self.finite: set[int] = set()  # the updates whose gradients were numbers in some trial
        self._what = trace.what
        self._probe = PartsProbe(
            trace.function,
            trace.inputs,
            [*dense.values(), *(each[2] for each in self._lookups), *trace.outputs],
            ([op for op in trace.graph.get_operations() if has_effect(op)], trace.written),
            moves=True,
        )

    def run(self, tensors: Sequence[tf.Tensor]) -> None:
        """Tries the step with samples of a batch, as they are and changed."""
        given = max((int(tensor.shape[0]) for tensor in tensors), default=0)
        rows = min(given // 3 * 3 or _LEAST_ROWS, _MOST_ROWS)
        samples = Samples(rows, [some_rows(tensor, rows) for tensor in tensors])
        try:
            self._take(self._probe.compare(samples))
        except tf.errors.OpError as error:
            raise UnsupportedModelError(
                f"{self._what} does not run with some samples of the first batch alone, as "
                f"replicas would ({describe(error)}). If it looks at several together: {_ADVICE} "
                "If a number of samples is built in: ask for it with keras.ops.shape(x)[0]."
            ) from error
        # What depends on what there was before shows itself from the second time on.
        for change, sizes in _CHANGES:
            with contextlib.suppress(tf.errors.OpError):  # content that it does not take
                self._take(self._probe.compare(samples.changed(change), sizes))
        for change, distance in _MOVED:
            unclear = any(kinds >= {MEAN, SUM} for kinds in (*self.results, *self.state))
            if change is much_larger and not (unclear or self.unknown()):
                break
            self._probe.move(distance)
            with contextlib.suppress(tf.errors.OpError):
                self._take(self._probe.compare(samples.changed(change)))

    def fixed(self, number: int) -> dict[int, list[bool]]:
        """For each lookup of an update's sparse gradients whether it reads the same rows."""
        fixed: dict[int, list[bool]] = {}
        for reads, (n, i, *_) in zip(self._reads, self._lookups, strict=True):
            if n == number:
                fixed.setdefault(i, []).append(reads == {SAME})
        return fixed

    def unclear(self, number: int) -> list[int]:
        """The gradients of an update with rows that follow from several samples together."""
        pairs = zip(self._reads, self._lookups, strict=True)
        return [i for reads, (n, i, *_) in pairs if n == number and reads not in ({SAME}, {ROWS})]

    def unknown(self) -> set[int]:
        """The updates whose gradients have been zero in all trials."""
        shown = {n for (n, _), kinds in self.gradients.items() if not kinds >= {MEAN, SUM}}
        return {n for n, _ in self.gradients} - shown

    def _take(self, found: Compared) -> None:
        """Takes in what a trial shows."""
        sizes_of: dict[int, list[float]] = {}  # of the gradients of each update
        broken = set()
        for place, (number, _) in enumerate(self.gradients):
            whole, *parts = [run.values[place] for run in (found.whole, *found.parts)]
            sizes_of.setdefault(number, []).append(float(np.max(np.abs(whole), initial=0.0)))
            if not all(np.isfinite(gradient).all() for gradient in (whole, *parts)):
                broken.add(number)
        self.finite |= {*sizes_of} - broken
        largest = {n: max(filter(np.isfinite, each), default=0.0) for n, each in sizes_of.items()}
        places = itertools.count()
        for key in self.gradients:
            self.gradients[key] &= found.kinds(next(places), largest[key[0]])
        for reads, (*_, of_samples) in zip(self._reads, self._lookups, strict=True):
            reads.add(rows_read(found, next(places), of_samples))
        self.results = [kinds & found.kinds(next(places)) for kinds in self.results]
        self.state = [kinds & found.kinds_of_state(i) for i, kinds in enumerate(self.state)]
        self.counters = self._probe.counters()
        for i in self.counters:
            moved = found.whole.state[i].astype(float) - found.start[i]
            self.drawn[i] = moved.ravel().tolist()


def found_kinds(trace: StepTrace, tensors: Sequence[tf.Tensor], by_rows: bool = False) -> StepKinds:
    """Tries a step, and chooses how to combine its values."""
    probe = StepProbe(trace)
    probe.run(tensors)
    numbers = range(len(trace.updates))
    return StepKinds(
        [_gradients(trace, probe, number) for number in numbers],
        [probe.fixed(number) for number in numbers],
        _check_rows(trace, probe) if by_rows else _results(trace, probe),
        _state(trace, probe),
        _drawn(trace, probe),
    )


def _gradients(trace: StepTrace, probe: StepProbe, number: int) -> list[str | None]:
    update = trace.updates[number]
    kinds = chosen_together({i: k for (n, i), k in probe.gradients.items() if n == number})
    mixed = {i for i, kind in kinds.items() if kind is None} | {*probe.unclear(number)}
    strange = [update.variables[i].path for i in sorted(mixed)]
    dense = [t for t in update.dense if t is not None]
    # What follows from weights alone, or is zero whatever the samples are, may be of any kind.
    of_weights = all(t.op not in trace.of_samples or is_zero(t) for t in dense)
    wrong, advice = None, _ADVICE
    if strange:
        wrong = f"mix samples or add to a sum ('{strange[0]}', {len(strange) - 1} more): {_NEITHER}"
    elif kinds and number not in probe.finite:
        wrong = "are not finite for some samples of the first batch by themselves"
        advice = "Compute each sample's loss by itself, or begin with a smaller loss scale."
    elif number in probe.unknown() and not of_weights:
        wrong = "are zero for samples of the first batch, also with other weights"
        advice = "Leave out an update whose loss does not count, or train in one process."
    elif (bent := nonlinear(dense, trace.of_samples)) is not None:
        wrong = (
            f"do not follow linearly from a sum or mean over samples ('{bent.name}', {bent.type})"
        )
    if wrong:
        raise UnsupportedModelError(
            f"The gradients that {trace.what} applies with optimizer '{update.optimizer.name}' "
            f"{wrong}, so replicas with a share of the batch each may train otherwise than one "
            f"process. {advice}"
        )
    return [kinds.get(i) for i in range(len(update.variables))]


def _results(trace: StepTrace, probe: StepProbe) -> list[str]:
    found = []
    for i, kinds in enumerate(probe.results):
        kind: str | None = SAME
        if i not in trace.of_variables:
            bent = nonlinear([trace.outputs[i]], trace.of_samples)
            kind = chosen(kinds, (MEAN, SUM, SAME)) if bent is None else None
        if kind is None:
            raise UnsupportedModelError(
                f"What {trace.what} returns as '{trace.names[i]}' mixes samples: it is {_NEITHER}. "
                "Return what a keras.metrics.Metric gives as its result, updated in the step, or "
                "a mean over the samples."
            )
        found.append(kind)
    return found


def _check_rows(trace: StepTrace, probe: StepProbe) -> list[str]:
    """Refuses predictions that do not consist of the predictions of some samples."""
    for name, kinds, rows in zip(trace.names, probe.results, trace.outputs, strict=True):
        if ROWS not in kinds or any(uses_of_sums([rows], trace.of_samples)):
            raise UnsupportedModelError(
                f"What {trace.what} returns{f' as {name!r}' if name else ''} does not have one row "
                "or more for each sample that follows from that sample alone, so the predictions "
                "of replicas do not make it up. Predict in one process."
            )
    return []


def _drawn(trace: StepTrace, probe: StepProbe) -> list[tuple[int, list[float]]]:
    """What counts the numbers that samples have; others are the same on all replicas."""
    for i, kinds in probe.counters.items():
        if len(kinds) > 1:
            warnings.warn(
                f"{trace.what} draws numbers for each sample and numbers for all of them with one "
                f"generator ('{trace.written[i].name}'), so the latter are others on each replica. "
                "Draw them with a keras.random.SeedGenerator of their own.",
                stacklevel=2,
            )
    return [(i, moved) for i, moved in probe.drawn.items() if True in probe.counters[i]]


def _state(trace: StepTrace, probe: StepProbe) -> list[str]:
    found = []
    updated = {v.value.ref() for update in trace.updates for v in update.variables}
    for i, (variable, kinds) in enumerate(zip(trace.written, probe.state, strict=True)):
        order: tuple[str, ...] = (SAME, SUM, MEAN)
        if i in probe.drawn or variable.ref() in updated:
            order = (SAME,)
        of_samples, bends = trace.written_with(variable)
        if of_samples:  # which may show with other samples only
            order = tuple(kind for kind in order if kind != SAME)
        kind = None if bends else chosen(kinds, order)
        if kind is None:
            raise UnsupportedModelError(
                f"{trace.what} writes '{variable.name}' with what mixes samples: it is {_NEITHER}. "
                "Take tf.reduce_mean of the samples (in `compute_loss`, too: Keras keeps 'loss'), "
                "keep it in a keras.metrics.Mean, or leave it out."
            )
        found.append(kind)
    return found
