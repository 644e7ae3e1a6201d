"""One probe: run the whole, run its parts, compare.

    samples   0 1 2 3 4 5            what the whole gives, w, is one of

    whole     x x x x x x   -->  w   ROWS   a, b                     one behind the other
    parts     x x           -->  a   SAME   a = b                    nothing follows from samples
                  x x x x   -->  b   MEAN   (2 a + 4 b) / 6          weighted by samples
                                     SUM    s + (a - s) + (b - s)    added to what was there, s

or it is refused by name: micro-batches and replicas would train something else than one process.
What may be of several kinds in one trial is of the kind that it may be of in all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.probes.trial_graph import DRAWS, FLOAT32, FLOAT64, TrialGraph
from tarantella_pp.runtime.stage.graph_functions import CompiledFunction, ancestors, unoptimized

ROWS, SAME, MEAN, SUM = "rows", "same", "mean", "sum"
ALL = frozenset((ROWS, SAME, MEAN, SUM))

# How far numbers may be apart, relative to the largest, that are computed in the same way.
TOLERANCES = {tf.float64: 1e-10, tf.float32: 1e-5, tf.bfloat16: 2e-2, tf.float16: 2e-2}
# Bytes of weights, and of all tensors of a trial, up to which it takes twice of that for float64.
# Trials that would be larger have fewer samples, too.
_MOST_COPIED, _MOST_COMPUTED = 64 << 20, 256 << 20
# Samples of a trial, unless it is known that they are more, and of the largest trials.
_FEW, _FEWEST = 48, 3
# How much farther apart numbers may be that were computed in other shapes, and how far at most.
_SHAPES, _COARSEST = 30, 0.1
# Units of rounding of the value itself that count as no difference.
_ROUNDING = 64
# What of the tolerance for the largest of several values counts for all of them.
FLOOR = 1e-2
Array = np.ndarray[Any, Any]
_T = TypeVar("_T")


def kinds_of(
    start: Array | float,
    whole: Array,
    parts: Sequence[Array],
    shares: Sequence[float],
    tolerance: float,
    largest: float = 0.0,
) -> frozenset[str]:
    """Says how a value follows from the values of parts."""
    before, after, *each = [np.asarray(v, np.float64) for v in (start, whole, *parts)]
    if not all(np.isfinite(value).all() for value in (before, after, *each)):
        return ALL
    limit = _limit(whole.dtype, before, [after, *each], tolerance, largest)

    def close(value: Array) -> bool:
        return value.shape == after.shape and bool(np.all(np.abs(value - after) <= limit))

    fit = all(part.ndim and part.shape[1:] == each[0].shape[1:] for part in each)
    found = {ROWS} if after.ndim and fit and close(np.concatenate(each)) else set()
    if all(part.shape == after.shape for part in each):
        weighted = [share * part for share, part in zip(shares, each, strict=True)]
        found |= {SAME} if all(map(close, each)) else set()
        found |= {MEAN} if close(np.sum(weighted, axis=0)) else set()
        found |= {SUM} if close(before + np.sum([p - before for p in each], axis=0)) else set()
    return frozenset(found)


def _limit(
    dtype: Any, start: Array, values: Sequence[Array], tolerance: float, largest: float
) -> float:
    """How far apart two values may be that count as the same."""
    try:
        unit = float(ml_dtypes.finfo(dtype).eps)
    except ValueError:  # of whole numbers
        return 0.0
    sizes = [float(np.max(np.abs(value), initial=0.0)) for value in values]
    changes = [
        float(np.max(np.abs(value - start), initial=0.0)) if start.any() else size
        for value, size in zip(values, sizes, strict=True)
    ]
    return tolerance * max(*changes, FLOOR * largest) + _ROUNDING * unit * max(sizes)


def rows_read(found: Compared, place: int, of_samples: bool) -> str | None:
    """Whether a lookup reads rows for each sample, or the same ones for all; or none of these."""
    whole, parts = found.whole.values[place], [part.values[place] for part in found.parts]
    # One row or more for each sample are never the same: parts have fewer of them.
    if SAME in found.kinds(place):
        return None if of_samples and whole.size else SAME
    return ROWS if np.array_equal(np.sort(whole), np.sort(np.concatenate(parts))) else None


def chosen(kinds: frozenset[str], order: Sequence[str]) -> str | None:
    """Chooses one of the kinds that a value may be of."""
    return next((kind for kind in order if kind in kinds), None)


def chosen_together(found: Mapping[int, frozenset[str]]) -> dict[int, str | None]:
    """Chooses the kinds of gradients of one update: what shows nothing is as the others are."""
    order = (SUM, MEAN) if all(SUM in kinds for kinds in found.values()) else (MEAN, SUM)
    return {i: chosen(kinds, order) for i, kinds in found.items()}


class Samples:
    """Tensors with some samples along the first dimension; those not `batched` are of no sample."""

    def __init__(
        self, rows: int, tensors: Sequence[tf.Tensor], batched: Sequence[bool] | None = None
    ) -> None:
        self.rows = rows
        self.tensors = list(tensors)
        self.batched = [True] * len(self.tensors) if batched is None else batched

    def changed(self, change: Callable[[tf.Tensor], tf.Tensor]) -> Samples:
        """Other samples."""
        pairs = zip(self.tensors, self.batched, strict=True)
        return Samples(self.rows, [change(x) if one else x for x, one in pairs], self.batched)

    def of(self, rows: slice) -> Samples:
        """Some of the samples alone; a tensor may have several rows for each."""
        some = list(self.tensors)
        for i, tensor in enumerate(some):
            if self.batched[i]:
                times = tensor.shape[0] // self.rows
                some[i] = tensor[rows.start * times : rows.stop * times]
        return Samples(rows.stop - rows.start, some, self.batched)

    def in_parts(self, sizes: Sequence[int] = (1, 2)) -> list[slice]:
        """Parts of unlike sizes: of two halves with the same samples, means would tell nothing."""
        first = max(1, self.rows * sizes[0] // sum(sizes))
        return [slice(0, first), slice(first, self.rows)]


def most_samples(function: Any) -> int:
    """How many samples a trial of a traced function can have in the memory that it may take."""
    made = [tensor for op in function.graph.get_operations() for tensor in op.outputs]
    for_each = sum(_bytes(tensor, 2) - _bytes(tensor, 1) for tensor in made)
    return max(_FEWEST, _MOST_COMPUTED // max(1, for_each))


@dataclass(frozen=True)
class Outcome:
    """What a function made of some samples: its values, what it wrote and what it drew."""

    values: list[Array]
    state: list[Array]
    draws: Sequence[tf.Tensor]


@dataclass(frozen=True)
class Compared:
    """A whole and its parts; all began with the same state."""

    start: list[Array]
    whole: Outcome
    parts: list[Outcome]
    shares: list[float]
    tolerance: float

    @property
    def unlike(self) -> int:
        """How many values are of no kind."""
        return sum(not self.kinds(place) for place in range(len(self.whole.values)))

    def kinds(self, place: int, largest: float = 0.0) -> frozenset[str]:
        """The kinds that a value may be of; values of parts began with nothing."""
        return self._kinds(0.0, lambda run: run.values[place], largest)

    def kinds_in(self, place: int, i: int, scale: float = 0.0) -> frozenset[str]:
        """The kinds of a number in a value; what is small beside the scale may be rounding."""
        return self._kinds(0.0, lambda run: run.values[place].ravel()[i], scale / FLOOR)

    def kinds_of_state(self, place: int) -> frozenset[str]:
        """The kinds that a variable may be of."""
        return self._kinds(self.start[place], lambda run: run.state[place])

    def _kinds(
        self, start: Array | float, value: Callable[[Outcome], Array], largest: float = 0.0
    ) -> frozenset[str]:
        whole, *parts = map(value, (self.whole, *self.parts))
        return kinds_of(start, whole, parts, self.shares, self.tolerance, largest)


class PartsProbe:
    """Runs a traced function on samples and on parts of them, in numbers as wide as can be.

    Random numbers are drawn for the whole, and each part is given its samples' numbers: it would
    draw others by itself. Nothing changes: the function writes copies of its variables, of all of
    them if `moves` says that they may be moved.

    Attributes:
        tolerance: How far numbers may be apart that count as the same.
    """

    def __init__(
        self,
        function: Any,
        inputs: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        writes: tuple[Sequence[tf.Operation], Sequence[tf.Variable]] = ((), ()),
        rows: int = _FEW,
        moves: bool = False,
    ) -> None:
        operations = function.graph.get_operations()
        self._function, self._inputs = function, list(inputs)
        self._effects, written = writes
        needed = ancestors([*fetches, *(t for op in self._effects for t in op.inputs)])
        # The random numbers that the function draws.
        self.draws = [op.outputs[0] for op in operations if op in needed and DRAWS.match(op.type)]
        self._axes: list[int | None] = []  # along which these belong to samples, once compared
        self._fetches = list(fetches)
        self._variables = list(written)
        self._num_written = len(self._variables)
        self._distance = 0.0  # of all variables from where they began
        if moves:
            known = {id(variable.handle) for variable in written}
            self._variables += [v for v in function.graph.variables if id(v.handle) not in known]
        self._dtypes = {tensor.dtype for op in operations for tensor in op.outputs}
        weights = sum(v.shape.num_elements() * v.dtype.size for v in function.graph.variables)
        found = {dtype.as_datatype_enum for dtype in self._dtypes}
        made = (tensor for op in operations for tensor in op.outputs)
        small = bool(found & set(FLOAT64)) and weights <= _MOST_COPIED
        small = small and sum(_bytes(tensor, rows) for tensor in made) <= _MOST_COMPUTED
        copied = any(v.dtype.as_datatype_enum in FLOAT32 for v in function.graph.variables)
        wider = (FLOAT64, FLOAT32) if small else () if copied else (FLOAT32,)
        self._ways: list[Mapping[int, int]] = [*(way for way in wider if found & set(way)), {}]
        self._prepare()

    def _prepare(self) -> None:
        """Goes on to the widest numbers that are left and for which all operations are there."""
        way = self._ways.pop(0)
        try:
            self._compile(TrialGraph(self._function, self._variables, way))
        except Exception:
            if not self._ways:
                raise
            self._prepare()

    def _compile(self, graph: TrialGraph) -> None:
        self._graph, self._written = graph, graph.written[: self._num_written]
        distance, self._distance = self._distance, 0.0
        self.move(distance)
        dtypes = {graph.dtype(dtype) for dtype in self._dtypes}
        self.tolerance = min(_COARSEST, _SHAPES * max(TOLERANCES.get(d, 0.0) for d in dtypes))

        def compiled(
            given: Sequence[tf.Tensor],
            wanted: Sequence[tf.Tensor],
            effects: Sequence[tf.Operation] = (),
        ) -> Callable[..., list[tf.Tensor]]:
            carved = graph.extract(given, wanted, effects)
            specs = [tf.TensorSpec(tensor.shape, graph.dtype(tensor.dtype)) for tensor in given]
            return unoptimized()(CompiledFunction(carved, specs).__call__)

        self._draw = compiled(self._inputs, self.draws) if self.draws else lambda *_: []
        self._run = compiled([*self._inputs, *self.draws], self._fetches, self._effects)

    def compare(
        self,
        samples: Samples,
        sizes: Sequence[int] = (1, 2),
        given: Callable[[Samples, slice], Sequence[tf.Tensor]] = lambda some, _: some.tensors,
    ) -> Compared:
        """Runs the whole and its parts; a next comparison begins where the whole ends.

        `given` says what the function gets of samples, given their places among all.
        """

        def attempt() -> Compared:
            start, rows = self._state(), samples.rows
            whole = self._trial(given(samples, slice(0, rows)))
            places = samples.in_parts(sizes)
            each = [given(samples.of(own), own) for own in places]
            self._axes = self._axes_of_draws(each[0], whole)
            draws = [*zip(whole.draws, self._axes, strict=True)]
            shares = [(own.stop - own.start) / rows for own in places]

            def parted(in_turn: bool) -> Compared:
                parts = []
                for tensors, own in zip(each, places, strict=True):
                    drawn = [_of_rows(draw, axis, rows, own, in_turn) for draw, axis in draws]
                    self._restore(start)
                    parts.append(self._trial(tensors, drawn))
                return Compared(start, whole, parts, shares, self.tolerance)

            found = parted(in_turn=False)
            several = any(axis is not None and draw.shape[axis] > rows for draw, axis in draws)
            if several and found.unlike:
                found = min(found, parted(in_turn=True), key=lambda one: one.unlike)
            self._restore(whole.state)
            return found

        return self._in_widest(attempt)

    def move(self, distance: float) -> None:
        """Moves all variables away from where they began: weights of terms may begin at zero."""
        for variable in self._graph.written if distance != self._distance else ():
            _move(variable, distance - self._distance)
        self._distance = distance

    def run(self, tensors: Sequence[tf.Tensor], start: Sequence[Array] | None = None) -> Outcome:
        """Runs the function on some samples, from a state, or from where it has ended last."""
        if start is not None:
            self._restore(start)
        return self._in_widest(lambda: self._trial(tensors))

    def _in_widest(self, attempt: Callable[[], _T]) -> _T:
        """Tries something in the widest numbers that can be."""
        while self._ways:
            try:
                return attempt()
            except Exception:  # an operation that is not there, or content that it does not take
                self._prepare()
        return attempt()

    def counters(self) -> dict[int, set[bool]]:
        """Which written variables say what is drawn, and whether that has shapes of samples."""
        found = defaultdict[int, set[bool]](set)
        written = self._variables[: self._num_written]
        numbers = {id(variable.handle): i for i, variable in enumerate(written)}
        captures = {inner.op: id(outer) for outer, inner in self._function.graph.captures}
        for draw, axis in zip(self.draws, self._axes, strict=True):
            for handle in {captures.get(op, 0) for op in ancestors(draw.op.inputs[1:])}:
                if handle in numbers:
                    found[numbers[handle]].add(axis is not None)
        return found

    def _trial(
        self, inputs: Sequence[tf.Tensor], draws: Sequence[tf.Tensor] | None = None
    ) -> Outcome:
        """Runs the function on some samples."""
        draws = self._drawn(inputs) if draws is None else draws
        found = self._run(*map(self._graph.taken, inputs), *draws)
        return Outcome(list(map(array_of, found)), self._state(), draws)

    def _drawn(self, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return self._draw(*map(self._graph.taken, inputs))

    def _state(self) -> list[Array]:
        return [np.asarray(variable.numpy()) for variable in self._written]

    def _restore(self, values: Sequence[Array]) -> None:
        for variable, value in zip(self._written, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def _axes_of_draws(self, fewer: Sequence[tf.Tensor], whole: Outcome) -> list[int | None]:
        """Along which dimension random numbers belong to samples, if along any."""
        pairs = zip(whole.draws, self._drawn(fewer), strict=True)
        return [next((i for i, n in enumerate(a.shape) if n != b.shape[i]), None) for a, b in pairs]


def _move(variable: tf.Variable, distance: float) -> None:
    """Adds a share of their size to the numbers of a variable, and as much to zeros.

    Counters go far, for some losses begin late.
    """
    if variable.dtype.is_floating:
        wave = tf.cos(1.3 * tf.range(tf.cast(tf.size(variable), tf.float64)))
        # A mean in the kernels of many layers would leave nothing of what tells samples apart.
        mean = 0.3 if variable.shape.rank < 2 else 0.0
        largest = tf.cast(tf.reduce_max(tf.abs(variable)), tf.float64)
        size = tf.where(largest > 0, largest, 1.0) * distance
        added = size * (0.2 * tf.reshape(wave, variable.shape) + mean)
        variable.assign_add(tf.cast(added, variable.dtype))
    elif variable.dtype in (tf.int32, tf.int64):
        variable.assign_add(tf.fill(variable.shape, tf.constant(10**6, variable.dtype)))


def _bytes(tensor: tf.Tensor, rows: int) -> int:
    if tensor.shape.rank is None or not tensor.dtype.size:
        return 0
    return int(math.prod(size or rows for size in tensor.shape) * tensor.dtype.size)


def _of_rows(
    draw: tf.Tensor, axis: int | None, count: int, rows: slice, in_turn: bool
) -> tf.Tensor:
    """The random numbers of some samples: of all windows of each, or of each one in turn."""
    if axis is None:
        return draw
    each = draw.shape[axis] // count
    places = np.arange(each * count)
    own = places.reshape(each, count)[:, rows] if in_turn else places.reshape(count, each)[rows]
    return tf.gather(draw, own.ravel(), axis=axis)


def array_of(tensor: tf.Tensor) -> Array:
    """A tensor as an array, in double precision; complex numbers as pairs."""
    if tensor.dtype.is_complex:
        tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], axis=-1)
    if tensor.dtype.is_floating:
        tensor = tf.cast(tensor, tf.float64)
    array: Array = tensor.numpy()
    return array


def tensor_of(array: Array, dtype: tf.DType) -> tf.Tensor:
    """The tensor that an array was made of; see `array_of`."""
    return tf.cast(array[..., 0] + 1j * array[..., 1] if dtype.is_complex else array, dtype)


def some_rows(tensor: Any, rows: int) -> Any:
    """Makes as many samples as are needed, of those that there are."""
    return None if tensor is None else tf.gather(tensor, np.arange(rows) % int(tensor.shape[0]))


def smaller(tensor: tf.Tensor) -> tf.Tensor:
    """Other samples: numbers that are smaller, or zero in some; no two of them are alike."""
    rows = int(tensor.shape[0])
    return _multiplied(tensor, np.linspace(1.0, 0.3, rows), np.arange(rows) % 3 != 1)


def opposite(tensor: tf.Tensor) -> tf.Tensor:
    """Other samples: the last one first, and of the other sign in half of them."""
    rows = int(tensor.shape[0])
    factors = np.linspace(0.4, 1.0, rows) * np.where(np.arange(rows) % 2, 1.0, -1.0)
    return _multiplied(tensor[::-1], factors, np.arange(rows) % 3 != 0)


def much_larger(tensor: tf.Tensor) -> tf.Tensor:
    """Other samples: numbers that are much larger."""
    return 30 * tensor if tensor.dtype.is_floating else tensor


def apart(tensor: tf.Tensor) -> tf.Tensor:
    """Other samples: no two of them are alike, and no number of theirs is zero."""
    if not tensor.dtype.is_floating:
        return tensor
    wave = tf.abs(tf.cos(1.1 * tf.cast(tf.range(tf.size(tensor)), tf.float64)))
    wave = tf.reshape(tf.cast(wave, tensor.dtype), tf.shape(tensor))
    return 1.25 * tensor + 0.1 * (tf.reduce_max(tf.abs(tensor)) + 0.1) * wave


def alike(tensor: tf.Tensor) -> tf.Tensor:
    """Other samples: the first one again and again, which go where few of them may."""
    return tf.repeat(tensor[:1], tensor.shape[0], axis=0)


def _multiplied(tensor: tf.Tensor, factors: Array, kept: Array) -> tf.Tensor:
    """Multiplies numbers, and lets only some samples keep other content."""
    shape = [len(factors)] + [1] * (len(tensor.shape) - 1)
    if tensor.dtype.is_floating:
        return tensor * tf.cast(tf.reshape(factors, shape), tensor.dtype)
    return tf.where(tf.reshape(kept, shape), tensor, tf.zeros_like(tensor))
