"""How what a step computes of a batch follows from what it computes of parts, found by trying.

    samples     0 1 2 3 4 5 ...            gradients, logs and all that the step writes
    whole       x x x x x x    -->  g      are means or sums over the parts, or the same,
    parts       x x            -->  a      or the step would train otherwise on shares
                    x x x x    -->  b      of a batch than on all of it

Random numbers are drawn for the whole, and each part gets those of its samples. Nothing changes:
no weight is updated, and what the step itself writes is put back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.models.own_steps.step_trace import StepTrace
from tarantella_pp.models.own_steps.value_kinds import ALL, SAME, SUM, kinds_of
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.probes.metric_probe import some_rows
from tarantella_pp.runtime.probes.probe_trace import TOLERANCES
from tarantella_pp.runtime.tf_graph.compiled_function import CompiledFunction
from tarantella_pp.runtime.tf_graph.graph_split import has_effect
from tarantella_pp.runtime.tf_graph.subgraph import SubgraphExtractor, ancestors

PARTS = ((1, 2), (2, 1), (1, 2))
"""Thirds in the parts of each trial: as they are, changed, and changed in another way."""
LEAST_ROWS, MOST_ROWS = 6, 48
"""Samples of a trial. Those of a batch, as far as there are so many: a step may treat some samples
in another way, such as those of a rare class."""
_SHAPES, _COARSEST = 30, 0.1
"""How much farther apart numbers may be that were computed in other shapes, and how far at most."""
_WEIGHTS = (1.0, 2.0**-8, 2.0**-16)
"""Of scaled losses: the first with which all gradients are finite is tried."""
_DRAWS = re.compile(
    r"(Stateless|Stateful)?(Random(Uniform|Normal|StandardNormal|Gamma|Poisson|Binomial)"
    r"|StandardNormal|Uniform|(Parameterized)?TruncatedNormal|Multinomial)(Int|Full|Int64)*(V\d)?$"
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Trial:
    """What a step made of some samples.

    Attributes:
        values: All that is compared, in the order of `StepProbe`.
        state: What the step wrote.
        draws: The random numbers that it drew.
    """

    values: list[Array]
    state: list[Array]
    draws: list[tf.Tensor]


class StepProbe:
    """Tries a traced step out.

    Attributes:
        gradients: The kinds that each gradient may be of, by update and by variable.
        results: Those of each value that the step returns.
        state: Those of each variable that it writes.
        drawn: What a step adds to each variable that counts random numbers, by its position.
        weighted: The updates all of whose gradients are weighted as the trace is told to weight
            scaled losses; none if that changes anything else.
    """

    def __init__(self, trace: StepTrace, by_rows: bool = False) -> None:
        self._trace = trace
        self._by_rows = by_rows
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
        operations = trace.graph.get_operations()
        self._rows = LEAST_ROWS
        self._draws = [op.outputs[0] for op in operations if _DRAWS.match(op.type)]
        dtypes = {tensor.dtype for op in operations for tensor in op.outputs}
        self._tolerance = min(_COARSEST, _SHAPES * max(TOLERANCES.get(d, 0.0) for d in dtypes))
        effects = [op for op in operations if has_effect(op)]
        wanted = [tensor for update in trace.updates for tensor in update.tensors]
        fetches = [*wanted, *trace.outputs, *self._draws]
        self._run = self._compiled(trace.inputs, fetches, effects)
        self._run_with = self._run
        if self._draws:
            self._run_with = self._compiled([*trace.inputs, *self._draws], fetches, effects)

    def run(self, tensors: Sequence[tf.Tensor]) -> None:
        """Tries the step with samples of a batch, as they are and changed."""
        given = max((int(tensor.shape[0]) for tensor in tensors), default=0)
        self._rows = min(max(given // 3 * 3, LEAST_ROWS), MOST_ROWS)
        samples = [some_rows(tensor, self._rows) for tensor in tensors]
        before = self._state()
        try:
            self.weighted = self._try_weights(samples)
            self._compare(samples, self._sizes(PARTS[0]))
            # What depends on what there was before shows itself the second time.
            for sizes, change in zip(PARTS[1:], (_smaller, _opposite), strict=True):
                with contextlib.suppress(tf.errors.OpError):  # content that it does not take
                    self._compare([change(tensor) for tensor in samples], self._sizes(sizes))
                self._restore(before)
        finally:
            self._trace.weight.assign(1.0)
            self._restore(before)

    def _try_weights(self, samples: Sequence[tf.Tensor]) -> frozenset[int]:
        """Finds `weighted`; leaves a weight with which scaled losses have finite gradients.

        With half of the weight a gradient must be half as large, as if it were that of one of two
        equal parts that are added up.
        """
        if not self._trace.is_weighted:
            return frozenset()
        start, count = self._state(), len(self.gradients)
        for weight in _WEIGHTS:
            self._trace.weight.assign(weight)
            whole = self._try(samples)
            self._restore(start)
            if all(np.isfinite(gradient).all() for gradient in whole.values[:count]):
                break
        self._trace.weight.assign(weight / 2)
        halves = [self._try(samples)] * 2
        self._trace.weight.assign(weight)
        self._restore(start)
        found = list(self._kinds(start, whole, halves, [0.5, 0.5]))
        pairs = list(zip(self.gradients, found[:count], strict=True))
        weighted = set()
        for number in {number for number, _ in self.gradients}:
            own = [kinds for (other, _), kinds in pairs if other == number]
            follows = all(SUM in kinds for kinds in own)
            if follows == all(SAME in kinds for kinds in own):  # neither, or nothing but zeros
                return frozenset()
            if follows:
                weighted.add(number)
        alone = all(SAME in kinds for kinds in found[count:])
        return frozenset(weighted) if alone else frozenset()

    def _sizes(self, thirds: Sequence[int]) -> list[int]:
        """Samples of the parts of a trial."""
        return [self._rows // 3 * number for number in thirds]

    def _compare(self, samples: Sequence[tf.Tensor], sizes: Sequence[int]) -> None:
        """Runs the whole and its parts, and takes in what it shows."""
        start = self._state()
        whole = self._try(samples)
        lengths = self._lengths(samples, sizes[0], whole, start)
        parts = []
        for begin, size in zip((0, *itertools.accumulate(sizes)), sizes, strict=False):
            rows = slice(begin, begin + size)
            draws = [
                _of_rows(d, n, self._rows, rows) for d, n in zip(whole.draws, lengths, strict=True)
            ]
            self._restore(start)
            parts.append(self._try([tensor[rows] for tensor in samples], draws))
        self._restore(whole.state)  # from which the next trial goes on
        shares = [size / self._rows for size in sizes]
        kinds = iter(self._kinds(start, whole, parts, shares))
        self.gradients = {key: found & next(kinds) for key, found in self.gradients.items()}
        self.results = {key: found & next(kinds) for key, found in self.results.items()}
        self.state = {key: found & next(kinds) for key, found in self.state.items()}
        for i in self._counters:
            self.drawn[i] = (whole.state[i].astype(float) - start[i]).ravel().tolist()

    def _kinds(
        self, start: list[Array], whole: _Trial, parts: Sequence[_Trial], shares: list[float]
    ) -> Iterator[frozenset[str]]:
        """The kinds of gradients, results and state in one trial."""
        count = len(self.gradients)
        sizes = [np.max(np.abs(g), initial=0.0) for g in whole.values[:count]]
        largest = [
            max(
                size
                for size, (other, _) in zip(sizes, self.gradients, strict=True)
                if other == number
            )
            for number, _ in self.gradients
        ]
        for i, value in enumerate(whole.values):
            each = [part.values[i] for part in parts]
            weights = shares
            if self._by_rows and i >= count:
                each, weights = [np.concatenate(each) if value.ndim else each[0]], [1.0]
            most = float(largest[i]) if i < count else 0.0
            yield kinds_of(np.zeros_like(value), value, each, weights, self._tolerance, most)
        for i, before in enumerate(start):
            states = [part.state[i] for part in parts]
            yield kinds_of(before, whole.state[i], states, shares, self._tolerance)

    def _lengths(
        self, samples: Sequence[tf.Tensor], fewer: int, whole: _Trial, start: list[Array]
    ) -> list[int]:
        """How many rows of random numbers there are for a sample; 0 where they are of none."""
        if not self._draws:
            return []
        self._restore(start)
        less = self._try([tensor[:fewer] for tensor in samples])
        return [
            0 if tuple(a.shape) == tuple(b.shape) else int(a.shape[0]) // self._rows
            for a, b in zip(whole.draws, less.draws, strict=True)
        ]

    def _try(self, samples: Sequence[tf.Tensor], draws: Sequence[tf.Tensor] = ()) -> _Trial:
        call = self._run_with if draws else self._run
        found = iter(call(*samples, *draws))
        gradients = []
        for update in self._trace.updates:
            parts = [[next(found) for _ in parts] for parts in update.gradients]
            pairs = zip(update.variables, parts, strict=True)
            gradients += [_dense(variable, part) for variable, part in pairs if part]
        results = [_array(next(found)) for _ in self._trace.outputs]
        return _Trial([*gradients, *results], self._state(), list(found))

    @functools.cached_property
    def _counters(self) -> list[int]:
        """Which of the variables that the step writes say what random numbers are drawn."""
        sources = [tensor for draw in self._draws for tensor in draw.op.inputs[1:]]
        names = {op.name for op in ancestors(sources) if op.type == "Placeholder"}
        captures = self._trace.graph.captures
        handles = {id(outer) for outer, inner in captures if inner.op.name in names}
        return [i for i, v in enumerate(self._trace.written) if id(v.handle) in handles]

    def _compiled(
        self,
        given: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation],
    ) -> CompiledFunction:
        carved = SubgraphExtractor(self._trace.function).extract(given, fetches, effects)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
        return CompiledFunction(lambda *values: carved(*values), specs)

    def _state(self) -> list[Array]:
        return [value_of(variable) for variable in self._trace.written]

    def _restore(self, values: Sequence[Array]) -> None:
        for variable, value in zip(self._trace.written, values, strict=True):
            variable.assign(value)


def _smaller(tensor: tf.Tensor) -> tf.Tensor:
    """Other samples: numbers that are smaller, or zero in some; no two of them are alike."""
    rows = int(tensor.shape[0])
    return _multiplied(tensor, np.linspace(1.0, 0.3, rows), np.arange(rows) % 3 != 1)


def _opposite(tensor: tf.Tensor) -> tf.Tensor:
    """Other samples: the last one first, and of the other sign in half of them."""
    rows = int(tensor.shape[0])
    factors = np.linspace(0.4, 1.0, rows) * np.where(np.arange(rows) % 2, 1.0, -1.0)
    return _multiplied(tensor[::-1], factors, np.arange(rows) % 3 != 0)


def _multiplied(tensor: tf.Tensor, factors: Array, kept: Array) -> tf.Tensor:
    """Multiplies numbers, and lets only some samples keep other content."""
    shape = [len(factors)] + [1] * (len(tensor.shape) - 1)
    if tensor.dtype.is_floating:
        return tensor * tf.cast(tf.reshape(factors, shape), tensor.dtype)
    return tf.where(tf.reshape(kept, shape), tensor, tf.zeros_like(tensor))


def _of_rows(draw: tf.Tensor, length: int, count: int, rows: slice) -> tf.Tensor:
    """The random numbers of some samples, which several blocks of samples may have."""
    if not length:
        return draw
    blocks = tf.reshape(draw, [length, count, *draw.shape[1:]])
    return tf.reshape(blocks[:, rows], [-1, *draw.shape[1:]])


def _dense(variable: Any, parts: list[tf.Tensor]) -> Array:
    """A gradient as an array, of slices, too."""
    if len(parts) == 1:
        return _array(parts[0])
    found = np.zeros(tuple(variable.shape), np.float64)
    np.add.at(found, parts[1].numpy(), _array(parts[0]))
    return found


def _array(tensor: tf.Tensor) -> Array:
    if tensor.dtype.is_floating:
        tensor = tf.cast(tensor, tf.float64)
    array: Array = tensor.numpy()
    return array
