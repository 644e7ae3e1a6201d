"""Tries a stage out before it first runs in micro-batches, and tells what its losses count.

    samples         a b c d e f          a b       c d e f       must give
    outputs         A B C D E F    =     A B   ,   C D E F       the same rows
    gradients       g              =     g'    +   g''           a sum, of a made-up loss
    added losses    l              =     l'    +   l''           a sum or a mean

What mixes samples, or looks at their number or at the place of one, gives something else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.cause import describe
from tarantella_pp.errors import UNCUT, UnsupportedModelError
from tarantella_pp.internals.functional import layer_metrics, sublayers
from tarantella_pp.internals.training import made_by_keras
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.runtime.probes.constants import Constant, constants_of
from tarantella_pp.runtime.probes.parts import (
    ALL,
    MEAN,
    SAME,
    SUM,
    Array,
    Compared,
    PartsProbe,
    Samples,
    alike,
    apart,
    kinds_of,
    much_larger,
    opposite,
)
from tarantella_pp.runtime.probes.probe_trace import ProbeTrace, samples_first
from tarantella_pp.runtime.stage.graph_functions import frontier, specs_of
from tarantella_pp.runtime.stage.side_effects import place_of, refuse_effects
from tarantella_pp.runtime.stage.stage_module import StageModule

# Samples to try a stage out with, of following micro-batches too; else the same ones once more.
# Parts of these must have other samples each: two of [a b] would have the same mean as the whole.
_WANTED, _ENOUGH = 6, 4
_METRIC_ROWS = 3  # to try out what layers' metrics count
# What losses are tried with besides: samples are changed and weights moved, until something shows.
_CHANGES = ((opposite, 0.0), (apart, 1.0), (much_larger, 1.0), (much_larger, 1e3))


@dataclass(eq=False)
class StageProbe:
    """Refuses a stage that would train something else in a pipeline, before any update."""

    module: StageModule
    # Gives weights of other stages: a function that reads one has no gradient for it
    others: Callable[[], Sequence[Any]] = list
    after: Callable[[int], set[int]] = lambda tensor: {tensor}  # what follows from a tensor
    num_replicas: int = 1
    is_plain: bool = False
    constants: list[Constant] = field(default_factory=list, init=False)  # if there are replicas
    _kinds: dict[bool, Array] = field(default_factory=dict, init=False)
    _factors: dict[tuple[bool, int, float], tf.Tensor] = field(default_factory=dict, init=False)

    @property
    def _axes(self) -> list[int | None]:
        return self.module.boundary.axes_of(self.module.boundary.inputs)

    def examine(
        self,
        rows: int,
        num_micro_batches: int,
        inputs: Sequence[tf.Tensor],
        following: Callable[[], Iterable[Sequence[tf.Tensor]]],
        *,
        training: bool,
    ) -> tuple[list[tf.Tensor], Callable[[], None]]:
        """Traces the stage; returns what it hands on, and what tries it out.

        It is tried with a micro-batch, and others if it is small. Nothing changes.
        """
        first = samples_first(inputs, self._axes)
        trace = self._trace(training, rows, first, num_micro_batches)
        refuse_effects(trace.function, self.module.layer, num_micro_batches, self.is_plain)
        self._refuse_gradients(trace)
        if self.num_replicas > 1:
            layer = self.module.layer
            held = *layer.variables, *layer.metrics_variables, *layer.read
            place = functools.partial(place_of, layer=layer)
            self.constants = list(constants_of(trace.function, place, held))
        unlike = list(trace.drawn_by)
        if trace.counts:
            again = self._trace(training, rows, first, num_micro_batches)
            unlike += filter(None, [trace.first_other(again, first)])
        for call in unlike:
            raise UnsupportedModelError(
                f"'{call.name}' ({call.kind}) draws random numbers of Python or NumPy, or counts "
                "in Python, when it is traced, so each trace that a pipeline needs would compute "
                "something else. Draw them with keras.random and a SeedGenerator of its own, and "
                "count in a weight with trainable=False."
            )
        if training:
            self._refuse_lost(trace, num_micro_batches > self.num_replicas)
            self._find_late(trace, num_micro_batches)

        def try_out() -> None:
            if num_micro_batches > 1:
                self._refuse_sizes(trace, first)
                self._refuse_parts(trace, self._enough(rows, first, following()))

        return trace.outputs(first) if self.module.boundary.sends else [], try_out

    def factors(self, training: bool, share: float) -> tf.Tensor:
        """What the added losses of a micro-batch count in the loss of the batch."""
        count = len(self.module.added_by[training])
        key = training, count, share
        if key not in self._factors:  # made once, for each micro-batch of each step asks for it
            kinds = self._kinds.get(training, np.zeros(count))
            self._factors[key] = tf.constant(np.maximum(kinds, share), keras.config.floatx())
        return self._factors[key]

    def _refuse_gradients(self, trace: ProbeTrace) -> None:
        """Refuses gradients that a layer takes of what other stages have computed."""
        pairs = zip(trace.given, self.module.boundary.inputs, strict=True)
        ids = {tensor.ref(): port.tensor for tensor, port in pairs if not port.mask}
        for scope, of, by in trace.asked:
            ends = {tensor.ref() for tensor in by}
            met, _ = frontier(of, lambda tensor: tensor.ref() in ends | ids.keys())  # noqa: B023
            through = {ids[tensor.ref()] for tensor in met if tensor.ref() not in ends}
            if any(through & self.after(ids[end]) for end in ends & ids.keys()):
                raise UnsupportedModelError(
                    f"{place_of(scope, self.module.layer)} calls tf.gradients by what an earlier "
                    "stage computes with, which is another graph, so it would miss a part. Use "
                    "num_stages=1, and replicas, or make one layer of all that it goes through."
                )

    def _refuse_lost(self, trace: ProbeTrace, several: bool) -> None:
        """Refuses weights whose gradient would be lost, where there are several micro-batches."""
        for op in trace.function.graph.get_operations() if several else ():
            # What its gradient needs TensorFlow keeps of the last run alone.
            if op.type == "EagerPyFunc" in [other.type for other in op.control_inputs]:
                raise UnsupportedModelError(
                    f"{place_of(op.name, self.module.layer)} calls tf.py_function, which has "
                    "gradients of the last micro-batch alone. Use num_micro_batches=1, or "
                    "tf.numpy_function within tf.custom_gradient."
                )
        for call in trace.cut_off:
            raise UnsupportedModelError(
                f"The gradient of '{call.name}' would not reach the layers before it: its output, "
                "or one before it, is declared to have integers or booleans, but has floating "
                "point numbers, or the other way round. Declare the dtype that it has, in "
                "compute_output_spec()."
            )
        read = {id(variable) for variable in trace.function.graph.variables}
        for weight in self.others():
            if id(weight.value) in read:
                lost = "gradient" if weight.trainable else "new values"
                raise UnsupportedModelError(
                    f"Stage {self.module.boundary.index} reads weight '{weight.path}', whose "
                    "layer is in another stage: a Lambda, a layer or keras.remat (instead of which "
                    f"there is recompute='all') reads it past that layer, so its {lost} would be "
                    "lost. Call the layer itself, make one layer of both, or use num_stages=1."
                )

    def _find_late(self, trace: ProbeTrace, num_micro_batches: int) -> None:
        """Has what reads new moving averages get them, which one micro-batch alone can."""
        found = trace.read_late()
        if found is None:
            return
        if num_micro_batches > 1:
            raise UnsupportedModelError(
                f"'{found.path}' is read in the forward pass that has just changed it, but takes "
                f"in the whole batch, after all {num_micro_batches} micro-batches (of all "
                f"replicas). {UNCUT}, or read it before its layer is called."
            )
        self.module.statistics.waits = False

    def _refuse_parts(self, trace: ProbeTrace, samples: Samples) -> None:
        samples = samples.of(slice(0, min(samples.rows, trace.most_samples)))
        try:
            self._refuse_coupled(trace, samples)
        except UnsupportedModelError:
            # A unit of ReLU that is zero but for rounding, which is another in another shape,
            # is not so again with samples that are a little larger.
            self._refuse_coupled(trace, samples.changed(_larger))
        except tf.errors.InvalidArgumentError as error:  # one that takes no few samples
            raise _takes_no_parts(error, self.module.layer) from error
        self.module.means[trace.training] = _metric_means(trace, samples, self.num_replicas)

    def _refuse_coupled(self, trace: ProbeTrace, samples: Samples) -> None:
        for found in trace.both_ways(samples):
            if trace.training:
                self.module.accumulator.fixed = found.fixed
            if found.mixes or found.strange:
                strange = [trace.weights[place].path for place in found.strange]
                raise _mixed(trace, trace.first_call(samples), strange)
        self._refuse_mixed(trace, samples.changed(alike))
        if any("While" in op.type for op in trace.function.graph.get_operations()):
            with contextlib.suppress(tf.errors.InvalidArgumentError):  # of numbers that are indices
                self._refuse_mixed(trace, samples.changed(_unequal))  # which end when all are done?
        if trace.rows < samples.rows:  # as many as there are in training
            self._refuse_mixed(trace, samples, (trace.rows, samples.rows - trace.rows))
        self._factors.clear()
        if self.module.added_by[trace.training]:
            self._kinds[trace.training] = _added_kinds(trace, samples)
        if trace.mixes_rarely(samples):
            raise _mixed(trace, trace.first_to_see_sums(), [])

    def _refuse_mixed(
        self, trace: ProbeTrace, samples: Samples, sizes: Sequence[int] = (1, 2)
    ) -> None:
        if trace.compare(samples, sizes=sizes).mixes:
            raise _mixed(trace, trace.first_call(samples, sizes), [])

    def _refuse_sizes(self, trace: ProbeTrace, inputs: Sequence[tf.Tensor]) -> None:
        """Refuses layers that compute otherwise where they know how many samples there are."""
        if all(made_by_keras(part) for part in sublayers(self.module.layer)[1:]):
            return
        try:
            known = ProbeTrace(
                self.module, specs_of(inputs), trace.training, trace.rows, differentiates=False
            )
        except Exception as error:  # of a layer that runs with all samples of a batch only
            raise _takes_no_parts(error, self.module.layer) from error
        if (call := trace.first_other(known, inputs)) is not None:
            raise _mixes(call, [])

    def _trace(
        self, training: bool, rows: int, inputs: Sequence[tf.Tensor], num_micro_batches: int
    ) -> ProbeTrace:
        specs = [
            tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if one else spec
            for spec, one in zip(specs_of(inputs), self._batched(rows, inputs), strict=True)
        ]
        try:
            return ProbeTrace(self.module, specs, training, rows)
        except UnsupportedModelError:
            raise
        except Exception as error:  # whatever a layer says that runs with this many samples only
            trace = ProbeTrace(self.module, specs_of(inputs), training, rows)
            if num_micro_batches > 1:
                raise _takes_no_parts(error, self.module.layer) from error
            return trace

    def _batched(self, rows: int, inputs: Sequence[tf.Tensor]) -> list[bool]:
        """For each input whether it may have a row, or several, for each sample."""
        pairs = zip(inputs, self._axes, strict=True)
        return [
            axis is not None and len(x.shape) > 0 and x.shape[0] > 0 and x.shape[0] % rows == 0
            for x, axis in pairs
        ]

    def _enough(
        self, rows: int, inputs: Sequence[tf.Tensor], following: Iterable[Sequence[tf.Tensor]] = ()
    ) -> Samples:
        """Puts others beside samples that are too few to see which of them are mixed."""
        found = list(inputs)
        batched = self._batched(rows, inputs)
        size = rows

        def beside(more: Iterable[tf.Tensor]) -> list[tf.Tensor]:
            trios = zip(found, more, batched, strict=True)
            return [tf.concat([x, y], 0) if one else x for x, y, one in trios]

        for more in following if any(batched) else ():
            if size >= _WANTED or len(more) != len(found):
                break
            place = batched.index(True)
            size += more[place].shape[0] * rows // inputs[place].shape[0]
            found = beside(more)
        while size < _ENOUGH:
            found = beside(found if size > 1 else map(apart, found))
            size *= 2
        return Samples(size, found, batched)


def _metric_means(trace: ProbeTrace, samples: Samples, num_replicas: int) -> list[Any]:
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
    probe = trace.writing([variable.value for variable, *_ in metrics])
    # The first samples only: later ones may be the same once more, in another part.
    first = samples.of(slice(0, _METRIC_ROWS))
    trials = [_written(probe, first)]
    # What shows nothing while a weight is zero, or samples are alike or small, shows itself later.
    probe.move(0.1)
    for change in (apart, much_larger):
        with contextlib.suppress(tf.errors.OpError):  # content that a layer does not take
            trials.append(_written(probe, first.changed(change)))
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


def _written(probe: PartsProbe, samples: Samples) -> tuple[Compared, list[Array], list[Array]]:
    """What is written with samples, once more from there, and with one part after the other."""
    found = probe.compare(samples)
    again = probe.run(samples.tensors).state
    in_turn = found.start
    for part in samples.in_parts():
        in_turn = probe.run(samples.of(part).tensors, in_turn).state
    return found, again, in_turn


def _same(first: Array, second: Array) -> bool:
    """Returns whether two values of a variable differ by rounding at the most."""
    return SAME in kinds_of(0.0, first, [second], [1.0], tolerance=0.0)


def _added_kinds(trace: ProbeTrace, samples: Samples) -> Array:
    """Which losses that layers add are sums (1) and which are means (0)."""
    kinds = [each & {SUM, MEAN} for each in trace.compare(samples).added]
    for change, moved in _CHANGES:
        if moved and all(len(each) < 2 for each in kinds):
            break  # other weights need copies of all
        with contextlib.suppress(tf.errors.OpError):  # made-up content that a layer does not take
            again = trace.compare(samples.changed(change), moved=moved).added
            kinds = [one & two for one, two in zip(kinds, again, strict=True)]
    names, count = trace.added_by, len(kinds)
    for place, (name, each) in enumerate(zip(names, kinds, strict=True)):
        if not each or trace.bends(place):  # which may show with other samples only
            raise _not_additive(name)
    known = np.array([np.nan if len(each) > 1 else float(SUM in each) for each in kinds])
    for i in map(int, np.flatnonzero(np.isnan(known))):  # what shows in the gradients alone
        one = np.eye(count)[i]
        fits = [kind for kind in (0.0, 1.0) if _gradients_add_up(trace, samples, one, kind * one)]
        if not fits or (len(fits) > 1 and not trace.is_zero(i)):
            raise _not_additive(names[i])
        known[i] = fits[0]
    every = 1 + np.arange(count) / 7
    if not _gradients_add_up(trace, samples, every, known):
        each_alone = [_gradients_add_up(trace, samples, one, known) for one in np.diag(every)]
        raise _not_additive(names[each_alone.index(False) if False in each_alone else 0])
    return known


def _gradients_add_up(trace: ProbeTrace, samples: Samples, factors: Array, sums: Array) -> bool:
    """Whether losses, some sums and the others means, have such gradients, too."""
    found = trace.compare(samples, factors, sums)
    return not (found.mixes or found.strange)


def _larger(tensor: tf.Tensor) -> tf.Tensor:
    return 1.01 * tensor if tensor.dtype.is_floating else tensor


def _unequal(tensor: tf.Tensor) -> tf.Tensor:
    """Much larger numbers in the first third, and smaller and smaller ones in the others."""
    rows = int(tensor.shape[0])
    factors = np.append(np.full(rows // 3, 30.0), np.geomspace(0.3, 0.01, rows - rows // 3))
    factors = factors.reshape(-1, *[1] * (len(tensor.shape) - 1))
    return tensor * tf.cast(factors, tensor.dtype) if tensor.dtype.is_floating else tensor


def _mixed(trace: ProbeTrace, call: Call | None, strange: Sequence[str]) -> UnsupportedModelError:
    if call is not None or (chosen := trace.first_to_choose_rows()) is None:
        return _mixes(call, strange)
    return UnsupportedModelError(
        f"'{chosen.name}' ({chosen.kind}) gives a shape that depends on what samples contain: it "
        "may be another one for some samples of a batch than for all, and whose rows these are "
        "cannot be known. Keep padding, and have rows that are picked put back in the same layer "
        f"or stage, as tf.tensor_scatter_nd_update and tf.dynamic_stitch do. {UNCUT} otherwise."
    )


def _mixes(call: Call | None, strange: Sequence[str]) -> UnsupportedModelError:
    what, how = "One of the layers", "gradient"
    if call is not None:
        what, how = f"'{call.name}' ({call.kind})", "result"
    elif strange:
        what = f"The layer of weight '{strange[0]}'"
    return UnsupportedModelError(
        f"{what} mixes samples, or looks at the number of samples or at the place of one: its "
        f"{how} for some samples of a batch may change when they are alone, so in micro-batches "
        f"it would train something else than in one process. {UNCUT}, or a form of the layer that "
        "treats each sample by itself, with the samples along the first dimension."
    )


def _takes_no_parts(error: Exception, layer: Any) -> UnsupportedModelError:
    said = describe(error)
    what = place_of(said.rpartition("(node ")[2].partition(",")[0], layer)
    return UnsupportedModelError(
        f"{what if what.startswith('Layer') else 'A layer'} does not run with fewer samples than a "
        f"batch has, as in micro-batches: {said}. {UNCUT}, or a form of the layer that treats each "
        "sample by itself, and asks for keras.ops.shape(x)[0] of inputs without batch_shape."
    )


def _not_additive(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Layer '{name}' adds a loss that is not to be recognized as a sum or a mean over the "
        "samples of the batch: what it is for some of them depends on others. In micro-batches it "
        f"would train something else than in one process. {UNCUT}, or add ops.sum or ops.mean of "
        "one value for each sample."
    )
