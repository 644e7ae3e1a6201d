"""A stage traced for being tried out: any number of rows, nothing written, gradients in short."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tarantella_pp.internals.functional import sublayers
from tarantella_pp.internals.training import body_of, gradients_asked, moments_known
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.probes.linearity import (
    Sized,
    following,
    is_zero,
    nonlinear,
    nonlinear_uses,
    sums_of,
    uses_of_sums,
)
from tarantella_pp.runtime.probes.parts import (
    FLOOR,
    ROWS,
    SAME,
    SUM,
    Compared,
    PartsProbe,
    Samples,
    kinds_of,
    most_samples,
    rows_read,
    tensor_of,
)
from tarantella_pp.runtime.stage.graph_functions import FlatGradients, frontier
from tarantella_pp.runtime.stage.graph_split import has_effect
from tarantella_pp.runtime.stage.side_effects import read_late
from tarantella_pp.runtime.stage.stage_module import StageModule

Array = NDArray[Any]


def samples_first(
    tensors: Sequence[Any], axes: Sequence[int | None], *, undo: bool = False
) -> list[Any]:
    """Puts the dimension of the samples first, or back to where it was."""
    return [
        keras.ops.moveaxis(x, *((0, axis) if undo else (axis, 0)))
        if axis and len(x.shape) > axis
        else x
        for x, axis in zip(tensors, axes, strict=True)
    ]


# How far sums over samples are moved, relative to their size, and what then counts as no change.
_MOVES, _ROUGHLY = (0.0, 1.0, -1.0, 1e2, 1e8, 1e16), 1e-4
# Size beside which gradients are rounding, as they are of `tanh` at large numbers: the gradients of
# outputs that they are made of are about one.
_SEEDS = 1e-3
# What TensorFlow raises where it cannot differentiate a graph.
_NO_GRADIENT = (NotImplementedError, LookupError)


class ProbeTrace:
    """Forward pass of a stage, and the gradient of a loss that is made up for it.

    What goes in and comes out has its samples along the first dimension.

    Batch normalizations use their moving statistics: that they couple samples is known. What the
    forward pass would write is left out, so that trying it out changes nothing.
    """

    def __init__(
        self,
        module: StageModule,
        specs: Sequence[tf.TensorSpec],
        training: bool,
        rows: int,
        differentiates: bool = True,
    ) -> None:
        self.module, self.rows, self.training = module, rows, training
        self._differentiates = training and differentiates
        self._parts: list[list[tf.Tensor]] = []
        self._made: list[tuple[Call, list[tf.Tensor]]] = []
        self.weights: list[Any] = []  # that get a gradient
        self._seeds: list[tf.Tensor] = []
        self._lookups: dict[int, list[tf.Tensor]] = {}  # the indices of each, of sparse gradients
        self._moments: list[tuple[Any, tf.Tensor]] = []  # of batch normalizations
        self._in_short: list[tf.Tensor] = []  # a product of each gradient, and its length
        self._probes: dict[bool, PartsProbe] = {}  # of weights as they are, and moved
        self.added_by: tuple[str, ...] = ()  # the layer that adds each added loss
        self.cut_off: list[Call] = []  # whose gradient would be lost between stages
        self.drawn_by: list[Call] = []  # with random numbers of Python or NumPy, while traced
        self._numbers = _random_numbers()
        kept = _kept_numbers(module.layer)
        place = tf.TensorSpec([2], tf.int32)
        factors = tf.TensorSpec([None], keras.config.floatx())
        traced = tf.function(self._trace, input_signature=[place, factors, *specs], autograph=False)
        self.function = traced.get_concrete_function()
        self.counts = _kept_numbers(module.layer) != kept  # layers, in Python, while traced
        self._feeds = self.function.inputs[: len(specs) + 2]
        self._samples = [t for t in self._feeds[2:] if t.shape.rank and t.shape[0] is None]
        self.most_samples = most_samples(self.function)  # of a trial with gradients
        self._tried = min(rows, self.most_samples)

    def _probe(self, moved: float = 0.0) -> PartsProbe:
        moves = moved > 0
        if moves not in self._probes:
            outputs, added, given, _, places = self._parts
            fetches = [*outputs, *added, *given, *self._in_short, *places]
            self._probes[moves] = PartsProbe(
                self.function, self._feeds, fetches, rows=self._tried, moves=moves
            )
        self._probes[moves].move(moved)
        return self._probes[moves]

    def compare(
        self,
        samples: Samples,
        factors: Array | float = 0.0,
        sums: Array | float = 0.0,
        sizes: Sequence[int] = (1, 2),
        moved: float = 0.0,
    ) -> StageKinds:
        """Runs the stage on samples and on parts of them, with other weights if asked to.

        `factors` says what each added loss counts in the loss. In the loss of a part, means count
        by the part's share of the samples, and `sums` (1 for each that is one) as they are.
        """

        def given(some: Samples, rows: slice) -> list[tf.Tensor]:
            shares = np.full(len(self.added_by), some.rows / samples.rows)
            return self._placed(some, rows.start, factors * np.maximum(sums, shares))

        return self._kinds(self._probe(moved).compare(samples, sizes, given))

    def _placed(self, samples: Samples, place: int, factors: Array) -> list[tf.Tensor]:
        """What the traced function is given: where the samples are among all, and factors."""
        where = tf.constant([place, samples.rows], tf.int32)
        return [where, tf.constant(factors, keras.config.floatx()), *samples.tensors]

    def _kinds(self, found: Compared) -> StageKinds:
        outputs, begin = len(self._parts[0]), sum(map(len, self._parts[:3]))
        values = [found.kinds(i) & {ROWS, SAME} for i in range(outputs)]
        values += [found.kinds(i, _SEEDS) & {ROWS, SUM} for i in range(outputs + 1, begin)]
        strange: list[int] = []
        if self.weights:
            lengths = [trial.values[begin + 1] for trial in (found.whole, *found.parts)]
            longest = np.max(lengths, axis=0)
            # Beside which others are rounding.
            longest = np.maximum(longest, FLOOR * max(longest.max(), _SEEDS))
            pairs = enumerate(longest)
            strange = [i for i, size in pairs if SUM not in found.kinds_in(begin, i, float(size))]
        place = iter(range(begin + 2, len(found.whole.values)))
        fixed = {
            i: [rows_read(found, next(place), tensor.op in self._follows) for tensor in tensors]
            for i, tensors in self._lookups.items()
        }
        of_weight = {id(weight): number for number, weight in enumerate(self.weights)}
        weights = self.module.accumulator.weights
        strange += [of_weight[id(weights[i])] for i, each in fixed.items() if None in each]
        return StageKinds(
            not all(values),
            [found.kinds_in(outputs, i) for i in range(len(self.added_by))],
            strange,
            {i: [kind == SAME for kind in each] for i, each in fixed.items()},
        )

    def both_ways(self, samples: Samples) -> Iterator[StageKinds]:
        """Compares, with random numbers twice: these may pair samples of one part by chance."""
        for sizes in ((1, 2), (2, 1))[: 2 if self._probe().draws else 1]:
            yield self.compare(samples, sizes=sizes)

    @functools.cached_property
    def _follows(self) -> set[Any]:
        seeds = [seed for seed in self._seeds if not seed.shape.is_fully_defined()]
        return following(self.function.graph, [*self._samples, *seeds])

    def _added(self, loss: int) -> tf.Tensor:
        return self._parts[1][0].op.inputs[loss]

    def bends(self, loss: int) -> bool:
        """Whether an added loss is made of sums over samples in a way that is not linear."""
        return nonlinear([self._added(loss)], self._follows) is not None

    def is_zero(self, loss: int) -> bool:
        """Whether an added loss is always zero, as regularizers with a factor of zero are."""
        return is_zero(self._added(loss))

    def mixes_rarely(self, samples: Samples) -> bool:
        """Whether samples see sums over all of them that change something if these are others."""
        outputs, _, given, raw, places = self._parts
        users = list(uses_of_sums(outputs, self._follows))
        if any(Sized(op) in self._follows for op in users):
            return True  # of rows that the samples that are tried need not have
        users += nonlinear_uses([*given, *raw], self._follows)
        sums = sums_of(users, self._follows)
        if not sums:
            return sums is None
        inputs = self._placed(samples, 0, np.zeros(len(self.added_by)))
        made = PartsProbe(self.function, self._feeds, sums, rows=self._tried).run(inputs)
        fetches, feeds = [*outputs, *given, *self._in_short, *places], [*self._feeds, *sums]
        probe = PartsProbe(self.function, feeds, fetches, rows=self._tried)
        pairs = list(zip(sums, made.values, strict=True))
        moved = [[*inputs, *(_moved(*pair, by) for pair in pairs)] for by in _MOVES]
        honest, *others = [probe.run(tensors).values for tensors in moved]
        return any(
            SAME not in kinds_of(0.0, one, [other], [1.0], _ROUGHLY)
            for each in others
            for one, other in zip(honest, each, strict=True)
        )

    def first_to_see_sums(self) -> Call | None:
        """The first of the stage's calls that gives samples what follows from all of them."""
        seen = (call for call, made in self._made if any(uses_of_sums(made, self._follows)))
        return next(seen, None)

    def first_to_choose_rows(self) -> Call | None:
        """The first call whose rows samples' content chooses, if the stage hands on any such."""
        made = [([Sized(t.op) in self._follows for t in each], c) for c, each in self._made]
        sent = any(Sized(tensor.op) in self._follows for tensor in self._parts[0])
        return next((call for chosen, call in made if sent and any(chosen)), None)

    def outputs(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The stage's outputs for some inputs, as it hands them on."""
        outputs, boundary = self._parts[0], self.module.boundary
        probe = PartsProbe(self.function, self._feeds, outputs, rows=self.rows)
        given = self._placed(Samples(self.rows, inputs), 0, np.zeros(len(self.added_by)))
        pairs = zip(outputs, probe.run(given).values, strict=False)
        made = [tensor_of(value, output.dtype) for output, value in pairs]
        return samples_first(made, boundary.axes_of(boundary.outputs), undo=True)

    def first_other(self, other: ProbeTrace, inputs: Sequence[tf.Tensor]) -> Call | None:
        """The first of the stage's calls whose result is another one as it is traced there."""
        if not any(self._differ(other, inputs, lambda trace: trace._parts[0])):
            return None
        differ = self._differ(other, inputs, ProbeTrace._results)
        calls = (call for call, tensors in self._made for _ in tensors)
        return next((call for call, is_other in zip(calls, differ, strict=True) if is_other), None)

    def _differ(
        self,
        other: ProbeTrace,
        inputs: Sequence[tf.Tensor],
        fetched: Callable[[ProbeTrace], Sequence[tf.Tensor]],
    ) -> list[bool]:
        """Which results of two traces differ."""
        probes = [
            PartsProbe(each.function, each._feeds[2:], fetched(each), rows=self.rows)
            for each in (self, other)
        ]
        pairs = zip(*(probe.run(inputs).values for probe in probes), strict=True)
        tolerance = max(probe.tolerance for probe in probes)
        return [SAME not in kinds_of(0.0, one, [two], [1.0], tolerance) for one, two in pairs]

    def _results(self) -> list[tf.Tensor]:
        return [tensor for _, tensors in self._made for tensor in tensors]

    def writing(self, variables: Sequence[tf.Variable]) -> PartsProbe:
        """A probe of what the forward pass writes to some variables, whose weights may be moved."""
        inner = self._handles(variables)
        effects = [
            op
            for op in self.function.graph.get_operations()
            if has_effect(op) and any(tensor.ref() in inner for tensor in op.inputs)
        ]
        written = effects, variables
        return PartsProbe(self.function, self._feeds[2:], [], written, moves=True)

    def reads(self, variable: tf.Variable) -> bool:
        """Whether what the stage computes follows from the value of a variable."""
        return _read(self._computed, self._handles([variable]))

    def read_late(self) -> Any | None:
        """A moving average that results follow from once the stage has written it."""
        return read_late(self.function, self._moments, self._computed)

    @property
    def _computed(self) -> list[tf.Tensor]:
        """Outputs, added losses and gradients."""
        return [tensor for part in self._parts[:4] for tensor in part]

    def _handles(self, variables: Sequence[tf.Variable]) -> set[Any]:
        outside = {id(variable.handle) for variable in variables}
        captures = self.function.graph.captures
        return {handle.ref() for outer, handle in captures if id(outer) in outside}

    def first_call(self, samples: Samples, sizes: Sequence[int] = (1, 2)) -> Call | None:
        """The first of the stage's calls whose result for some samples changes with others."""
        probe = PartsProbe(self.function, self._feeds[2:], self._results(), rows=self._tried)
        found = probe.compare(samples, sizes)
        places = itertools.count()
        kinds = [(call, [found.kinds(next(places)) for _ in own]) for call, own in self._made]
        return next((c for c, each in kinds if not all(k & {ROWS, SAME} for k in each)), None)

    def _trace(self, place: tf.Tensor, factors: tf.Tensor, *inputs: tf.Tensor) -> tf.Tensor:
        module, layer, boundary = self.module, self.module.layer, self.module.boundary
        layer.observe = self._observe
        self.given = real = samples_first(inputs, boundary.axes_of(boundary.inputs), undo=True)
        try:
            with moments_known(layer) as self._moments, gradients_asked() as self.asked:
                results, added = module.run(real, self.training, tried=True)
        finally:
            layer.observe = None
        outputs = samples_first(results, boundary.axes_of(boundary.outputs))
        given: list[tf.Tensor] = []
        gradients: Sequence[Any] = []
        if self._differentiates:
            given, gradients = self._gradients(place, factors, inputs, outputs, added)
        pairs = zip(module.accumulator.weights, gradients, strict=False)
        found = [(weight, gradient) for weight, gradient in pairs if gradient is not None]
        self.weights = [weight for weight, _ in found]
        raw = [g.values if isinstance(g, tf.IndexedSlices) else g for _, g in found]
        self.added_by = module.added_by[self.training]
        self._lookups = FlatGradients(gradients).lookups
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        double = any(g.dtype.real_dtype == tf.float64 for g in raw)
        directions = functools.cache(functools.partial(_direction, double))
        each = zip(self.weights, raw, (self._lookups.get(i, ()) for i in present), strict=True)
        short = [_in_short(tuple(w.shape), g, rows, directions) for w, g, rows in each]
        products, squares = zip(*short or [(tf.zeros([0]), tf.zeros([0]))], strict=True)
        self._in_short = [tf.reshape(products, [-1]), tf.sqrt(2 * tf.reshape(squares, [-1]))]
        places = [indices for each in self._lookups.values() for indices in each]
        self._parts = [list(outputs), [added], given, raw, places]
        return added

    def _observe(self, call: Call, results: Sequence[Any]) -> None:
        # A layer may give nothing where it says a tensor, as XLNet's does.
        made = {t: x for t, x in zip(call.outputs, results, strict=True) if x is not None}
        tensors = list(map(tf.convert_to_tensor, made.values()))
        axes = [self.module.boundary.sample_axes.get(tensor, 0) for tensor in made]
        self._made.append((call, samples_first(tensors, axes)))
        if self._numbers != (numbers := _random_numbers()):
            self.drawn_by.append(call)
            self._numbers = numbers

    def _gradients(
        self,
        place: tf.Tensor,
        factors: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        added: tf.Tensor,
    ) -> tuple[list[tf.Tensor], Sequence[Any]]:
        sources, variables = self.module.sources(inputs), self.module.variables
        targets = self.module.targets(outputs, added)
        seeds = [tf.reshape(factors, tf.shape(added))]
        axes = self.module.boundary.axes_of(self.module.boundary.outputs_with_gradient)
        for axis, target in zip(axes, targets[1:], strict=True):
            seeds.append(tf.zeros_like(target) if axis is None else _pattern(target, place))
        self._seeds = seeds[1:]
        wanted = [*sources, *variables]
        self.cut_off = self._cut_off(outputs, wanted)
        if self.cut_off:
            return [], []
        try:
            found = tf.gradients(targets, wanted, grad_ys=seeds)
        except _NO_GRADIENT:  # such a stage runs on a tape
            return [], []
        return self.module.parted(sources, found)

    def _cut_off(self, outputs: Sequence[tf.Tensor], wanted: Sequence[Any]) -> list[Call]:
        """Finds calls whose gradient is lost: plans follow what layers say of their dtypes."""
        boundary = self.module.boundary
        tensors = {
            port.tensor
            for port, output in zip(boundary.outputs, outputs, strict=True)
            if (
                output.dtype.is_bool
                if port in boundary.outputs_with_gradient
                else _flows(output, wanted)
            )
        }
        return [call for call in self.module.layer.calls if not tensors.isdisjoint(call.outputs)]


def _flows(output: tf.Tensor, wanted: Sequence[Any]) -> bool:
    """Whether a gradient of an output would reach what is wanted."""
    if not (output.dtype.is_floating or output.dtype.is_complex):
        return False
    try:
        return any(gradient is not None for gradient in tf.gradients(output, wanted))
    except _NO_GRADIENT:  # there is one, but for a graph with any number of rows
        return True


class StageKinds(NamedTuple):
    """How what a stage makes of some samples follows from what it makes of parts of them."""

    mixes: bool  # whether its outputs, or the gradients of its inputs, do not
    added: list[frozenset[str]]  # the kinds that each added loss may be of
    strange: list[int]  # the weights whose gradients do not add up over the parts
    # For each lookup of a weight whether it reads the same rows whatever the samples are
    fixed: dict[int, list[bool]]


def _moved(tensor: tf.Tensor, value: Array, by: float) -> tf.Tensor:
    """Another value of a tensor."""
    if tensor.dtype.is_bool:
        return tf.constant(value == (not by))
    return tf.cast(value + by * (1.0 + np.abs(value)), tensor.dtype)


def _random_numbers() -> Any:
    """The states of the generators that all of the process shares."""
    numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - layers may use it
    return random.getstate(), numpy["key"].tobytes(), numpy["pos"]


def _kept_numbers(layer: Any) -> list[dict[str, Any]]:
    """The numbers of Python that layers keep."""
    kept = (vars(part).items() for part in sublayers(layer))
    return [{name: x for name, x in items if type(x) in (int, float)} for items in kept]


def _read(tensors: Sequence[tf.Tensor], handles: set[Any]) -> bool:
    """Whether tensors follow from the value of a variable; a function may only write it."""
    _, above = frontier(tensors, lambda tensor: tensor.ref() in handles)
    for op in above:
        if any(tensor.ref() in handles for tensor in op.inputs):
            body = body_of(op)
            if body is None:
                return True
            pairs = zip(body.inputs, op.inputs, strict=True)
            inside = {inner.ref() for inner, outer in pairs if outer.ref() in handles}
            if _read(body.outputs, inside):
                return True
    return False


def _pattern(tensor: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """Numbers of both signs with no simple relation; zeros where rows do not belong to samples."""
    if not tensor.shape.rank:
        return tf.zeros_like(tensor)
    # All stages are tried out in this way, so it has few operations.
    (first, samples), shape = tf.unstack(place), tf.shape(tensor)
    size = tf.size(tensor)
    begin = first * (size // samples)
    wave = tf.cos(1.7 * tf.cast(tf.range(begin, begin + size), tf.float64) + 1.0)
    wave *= tf.cast(tf.unstack(shape)[0] % samples == 0, tf.float64)
    return tf.reshape(tf.cast(wave, tensor.dtype), shape)


def _in_short(
    shape: tuple[int, ...],
    gradient: tf.Tensor,
    lookups: Sequence[tf.Tensor],
    directions: Callable[..., tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
    """A product of a gradient, which may be large, and half the square of its length."""
    columns = math.prod(shape[1:])
    right = directions(columns, 1.7, 1.0)
    values = tf.math.real(gradient) if gradient.dtype.is_complex else gradient
    values = tf.cast(values, right.dtype)
    if len(shape) != 2:
        values = tf.reshape(values, [-1, columns])
    left = directions(shape[0] if shape else 1, 1.3, 0.5)
    if lookups:  # of slices
        left = tf.gather(left, tf.concat([tf.reshape(each, [-1]) for each in lookups], 0))
    product = tf.matmul(left, tf.matmul(values, right), transpose_a=True)
    return product, tf.nn.l2_loss(values)


def _direction(double: bool, size: int, pace: float, start: float) -> tf.Tensor:
    """Numbers of both signs with no simple relation between them, as a column."""
    numbers = np.cos(pace * np.arange(size) + start)[:, None]
    return tf.constant(numbers, tf.float64 if double else tf.float32)
