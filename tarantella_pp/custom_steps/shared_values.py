"""What a step writes and returns, brought together over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.custom_steps.step_probe import StepKinds
from tarantella_pp.custom_steps.step_trace import StepTrace
from tarantella_pp.errors import ReplicaError
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.probes.parts import SAME, SUM

# How far apart sums over a variable may be on two replicas that have the same.
_APART = 1e-6

Array = np.ndarray[Any, Any]


class SharedValues:
    """Makes of what each replica writes and returns that of the whole batch, on all of them."""

    def __init__(self, trace: StepTrace, kinds: StepKinds, ranks: Communicator) -> None:
        known = [(v, kinds.state[id(v)]) for v in trace.written if id(v) in kinds.state]
        self._same = [v for v, kind in known if kind == SAME and id(v) not in kinds.drawn]
        self._added = [(v, kind == SUM) for v, kind in known if kind != SAME]
        self._counters = [(v, kinds.drawn[id(v)]) for v in trace.written if id(v) in kinds.drawn]
        self._results = kinds.results
        self._ranks = ranks
        self._before: list[Array] = []
        self._counted: list[Array] = []
        self._checksum = tf.function(self._sums, autograph=False)

    def begin(self) -> None:
        """Notes where the state begins, and lets each replica draw random numbers of its own."""
        self._before = [value_of(variable) for variable, _ in self._added]
        self._counted = [value_of(variable) for variable, _ in self._counters]
        self._count(self._ranks.rank)

    def finish(self, values: Sequence[tf.Tensor], share: float) -> dict[int, Array]:
        """Brings together what one step has made; all replicas must call it."""
        states = [value_of(variable).astype(np.float64) for variable, _ in self._added]
        mine = [
            self._part(state, before, share, is_sum)
            for state, before, (_, is_sum) in zip(states, self._before, self._added, strict=True)
        ]
        shown = [
            self._part(values[i].numpy().astype(np.float64), 0.0, share, kind == SUM)
            for i, kind in self._results.items()
        ]
        checks = np.zeros((self._ranks.size, len(self._same)))
        if self._same:
            checks[self._ranks.rank] = self._checksum().numpy()
        parts = [*mine, *shown, checks]
        flat = np.concatenate([np.zeros(0), *(np.ravel(part) for part in parts)])
        total = self._ranks.start_allreduce(flat, label="state and logs of the step").wait()
        ends = np.cumsum([np.size(part) for part in parts])[:-1]
        found = iter(np.split(total, ends))
        for (variable, is_sum), before in zip(self._added, self._before, strict=True):
            whole = next(found).reshape(before.shape) + (before if is_sum else 0)
            whole = np.rint(whole) if before.dtype.kind in "iub" else whole
            variable.assign(whole.astype(before.dtype))
        logs = {i: np.reshape(next(found), tuple(values[i].shape)) for i in self._results}
        self._check(next(found).reshape(checks.shape))
        self._count(self._ranks.size)
        return logs

    def clear(self) -> None:
        """Goes back to where the last step that did not end began."""
        for (variable, _), before in zip(self._counters, self._counted, strict=False):
            variable.assign(before)

    def _part(self, value: Any, before: Any, share: float, is_sum: bool) -> Any:
        """What this replica adds to a value of the whole batch."""
        if not share:
            return np.zeros_like(value)
        return value - before if is_sum else share * value

    def _count(self, times: int) -> None:
        for (variable, steps), start in zip(self._counters, self._counted, strict=True):
            variable.assign(start + (times * steps).astype(start.dtype))

    def _sums(self) -> tf.Tensor:
        return tf.stack([tf.reduce_sum(tf.cast(v, tf.float64)) for v in self._same])

    def _check(self, everyones: Array) -> None:
        """Compares sums over what must be the same on all replicas."""
        first = everyones[0]
        apart = np.abs(everyones - first) > _APART * np.maximum(np.abs(first), 1.0)
        for variable, differs in zip(self._same, apart.any(axis=0), strict=True):
            if differs:
                raise ReplicaError(
                    f"The step writes '{variable.name}', which is not the same on all replicas any "
                    "more. When the step was tried, before training, it did not follow from the "
                    "samples. Keep what follows from them in metrics, or as a mean or a sum over "
                    "the samples in every step."
                )
