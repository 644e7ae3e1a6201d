"""What a trial may not reach: what becomes of sums over samples, read off the traced graph.

samples    x   [None, 3]      what has no dimension of unknown size, and follows from samples,
sum        s   [3]            is a sum over them: with more operations that are linear it is
largest    max(s, 1)   [3]    the sum of what parts give, with others only sometimes

What several samples together decide, such as `any(x > 9)` or `max(x)`, counts as a sum; so does a
mean over rows whose number the content decides, such as `mean(x[x > 0])`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tarantella_pp.internals.training import body_of, written_by
from tarantella_pp.runtime.stage.graph_functions import frontier
from tarantella_pp.runtime.stage.graph_split import has_effect

# Operations that make of a sum what they make of its terms, added up.
_LINEAR = {
    *("AddN", "AddV2", "Add", "Sub", "Neg", "Identity", "IdentityN", "Cast", "Real", "Imag"),
    *("Sum", "Mean", "Cumsum", "Reshape", "Transpose", "ExpandDims", "Squeeze", "Pack", "Unpack"),
    *("ConcatV2", "Slice", "StridedSlice", "Split", "SplitV", "Tile", "BroadcastTo", "Fill"),
    *("Pad", "PadV2", "GatherV2", "UnsortedSegmentSum", "ScatterNd", "StopGradient", "Conj"),
    *("PreventGradient", "CheckNumerics", "MatrixBandPart", "DiagPart", "Complex", "Roll"),
    *("DynamicStitch", "ReverseV2", "EnsureShape", "MatrixDiagV3", "MatrixDiagPartV3"),
    *("DepthToSpace", "SpaceToDepth", "SpaceToBatchND", "BatchToSpaceND", "MirrorPad", "AvgPool"),
    *("FFT", "FFT2D", "FFT3D", "IFFT", "IFFT2D", "IFFT3D", "RFFT", "IRFFT", "ResizeBilinear"),
}
# They do if one thing that they are given follows from samples; so do gradients of what follows
# from weights, quotients in their numerator, and choices by other conditions.
_PRODUCTS = {"Mul", "MulNoNan", "MatMul", "BatchMatMulV2", "Einsum", "MatrixSetDiagV3"}
_PRODUCTS |= {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_GRADIENTS = re.compile(r"(Grad|Backprop(Input|Filter)?)(V\d+)?$")
_SUMS = {"AddN", "AddV2", "Add", "Sub", "Pack"}
_QUOTIENTS = {"RealDiv", "Div", "DivNoNan"}
_CHOICES = {"Select", "SelectV2"}
_BRANCHES = {"If", "StatelessIf"}
# These make of all samples together what is no sum of what they make of each.
_EXTREMES = {"Max", "Min", "Prod", "Any", "All", "EuclideanNorm"}
_SIZES = {"Shape", "ShapeN", "Size", "ZerosLike", "OnesLike"}
# How many rows these give is decided by the content of what they are given, as a mask does; and
# by some other numbers that these are given.
_CHOOSING = {"Where", "Unique", "UniqueV2", "UniqueWithCounts", "DynamicPartition", "ListDiff"}
_BOUNDED = {"Slice", "StridedSlice", "Range", "Fill", "Tile"}
# These have as many rows as one of the things that they are given.
_LIKE_ONE = {"GatherV2": 1, "ResourceGather": 1, "GatherNd": 1, "TensorScatterUpdate": 0}
_LIKE_ONE |= {"ScatterNd": 2, "UnsortedSegmentSum": 2, "TensorScatterAdd": 0}
# Which of the things that they are given says along which dimensions they move numbers.
_ALONG = {"Roll": 2, "ReverseV2": 1, "Cumsum": 1, "Cumprod": 1, "GatherV2": 2, "ConcatV2": -1}


class Sized(NamedTuple):
    """Marks an operation whose number of rows follows from what samples contain."""

    op: tf.Operation


def following(
    graph: tf.Graph, inputs: Iterable[tf.Tensor], sized: Iterable[tf.Tensor] = ()
) -> set[Any]:
    """What follows from what samples contain: operations, outputs of functions, numbers of rows."""
    found: set[Any] = {tensor.op for tensor in inputs} | {Sized(tensor.op) for tensor in sized}
    for op in graph.get_operations():
        follows = any(_follows(tensor, found) for tensor in op.inputs)
        if follows and op.type != "Rank" and (op.type not in _SIZES or _given_sized(op, found)):
            found.add(op)
            if _is_sized(op, found):
                found.add(Sized(op))
            # What reads a variable later follows from what is written to it, too.
            found |= {tensor.op for tensor in written_by(op) if has_effect(op)}
            if (body := body_of(op)) is not None:
                inside = _following_in(body, op, found)
                pairs = zip(body.outputs, op.outputs, strict=False)
                found |= {outer.ref() for inner, outer in pairs if _follows(inner, inside)}
                found |= {Sized(op) for inner in body.outputs if Sized(inner.op) in inside}
    return found


def _given_sized(op: tf.Operation, follows: set[Any]) -> bool:
    return any(Sized(tensor.op) in follows for tensor in op.inputs)


def _is_sized(op: tf.Operation, follows: set[Any]) -> bool:
    if all(tensor.shape.is_fully_defined() for tensor in op.outputs):
        return False
    if op.type in _LIKE_ONE:
        return Sized(op.inputs[_LIKE_ONE[op.type]].op) in follows
    if _puts_back(op, follows):
        return False
    numbers = (t for t in op.inputs if t.dtype.is_integer and t.shape.is_fully_defined())
    bounded = op.type in _BOUNDED and any(_follows(tensor, follows) for tensor in numbers)
    return op.type in _CHOOSING or bounded or _given_sized(op, follows)


def _puts_back(op: tf.Operation, follows: set[Any]) -> bool:
    """Whether it stitches all the parts together that rows have been divided into by their place.

    So there are as many rows again, whatever samples contain.
    """
    if not op.type.endswith("DynamicStitch"):
        return False
    places, divided = op.inputs[: len(op.inputs) // 2], op.inputs[0].op
    whole = {part.ref() for part in divided.outputs} == {part.ref() for part in places}
    return divided.type == "DynamicPartition" and whole and divided.inputs[0].op not in follows


def _averages_some(op: tf.Operation, follows: set[Any]) -> bool:
    """Whether it is a mean over as many values as samples' content says."""
    return op.type == "Mean" and _given_sized(op, follows) and Sized(op) not in follows


def _follows(tensor: tf.Tensor, follows: set[Any]) -> bool:
    return tensor.op in follows and (body_of(tensor.op) is None or tensor.ref() in follows)


def uses_of_sums(tensors: Sequence[tf.Tensor], follows: set[Any]) -> Iterator[tf.Operation]:
    """The operations above some tensors that are given a sum over samples, in their order."""
    _, above = frontier(tensors, lambda tensor: not _follows(tensor, follows))
    for op in tensors[0].graph.get_operations() if tensors else ():
        if op not in above:
            continue
        given = [tensor for tensor in op.inputs if _follows(tensor, follows)]
        body = body_of(op)
        if body is None:
            together = op.type in _EXTREMES or _averages_some(op, follows)
            used = any(map(_is_sum, op.outputs if together else given))
        else:
            used = any(uses_of_sums(body.outputs, _following_in(body, op, follows)))
        if used:
            yield op


def nonlinear(tensors: Sequence[tf.Tensor], follows: set[Any]) -> tf.Operation | None:
    """An operation whose results for parts do not add up to its result for a sum over samples."""
    return next(nonlinear_uses(tensors, follows), None)


def nonlinear_uses(tensors: Sequence[tf.Tensor], follows: set[Any]) -> Iterator[tf.Operation]:
    """All such operations; see `nonlinear`."""
    return (op for op in uses_of_sums(tensors, follows) if not _is_linear(op, follows))


def sums_of(users: Sequence[tf.Operation], follows: set[Any]) -> list[tf.Tensor] | None:
    """The sums that operations use, not those made of others; `None` if a function makes some."""
    todo: list[tf.Tensor] = []
    for op in users:
        if body_of(op) is not None:
            return None
        todo += filter(_is_sum, op.outputs if op.type in _EXTREMES else op.inputs)
    return first_sums(todo, follows)


def first_sums(tensors: Iterable[tf.Tensor], follows: set[Any]) -> list[tf.Tensor]:
    """Of some sums over samples, and those that they are made of, the ones not made of others."""

    def is_first(tensor: tf.Tensor) -> bool:
        given = [t for t in tensor.op.inputs if _follows(t, follows)]
        return not (_follows(tensor, follows) and given and all(map(_is_sum, given)))

    found, _ = frontier(tensors, is_first)
    return list({t.ref(): t for t in found if _follows(t, follows)}.values())


def moves_samples(tensor: tf.Tensor, follows: set[Any]) -> bool:
    """Whether something is made of samples in the places of others: all have them first."""
    _, above = frontier([tensor], lambda t: not _follows(t, follows))
    return any(map(_moves, above))


def _moves(op: tf.Operation) -> bool:
    # A shape that is computed may be any, but leaves numbers in their order.
    elsewhere = any(map(_later, op.outputs)) and not any(map(_later, op.inputs))
    elsewhere = elsewhere and op.type != "Reshape"
    if op.type == "StridedSlice":
        step = tf.get_static_value(op.inputs[3])
        all_of_them = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
        in_order = all_of_them and step is not None and step[0] == 1
        return elsewhere or not (op.get_attr("ellipsis_mask") & 1 or in_order)
    if op.type not in _ALONG:
        return elsewhere
    along = tf.get_static_value(op.inputs[_ALONG[op.type]])
    return elsewhere or along is None or 0 in np.ravel(along)


def _later(tensor: tf.Tensor) -> bool:
    """Whether samples may lie along another dimension than the first."""
    return tensor.shape.rank is not None and None in tensor.shape.as_list()[1:]


def nonlinear_write(op: tf.Operation, follows: set[Any]) -> bool:
    """Whether an operation that writes variables is given what is not linear in a sum."""
    if (body := body_of(op)) is not None:
        inside = _following_in(body, op, follows)
        writes = filter(has_effect, body.get_operations())
        return any(nonlinear_write(each, inside) for each in writes)
    return nonlinear([t for t in op.inputs if t.dtype != tf.resource], follows) is not None


def is_zero(tensor: tf.Tensor) -> bool:
    """Whether a constant factor makes a value zero, whatever it is made of."""
    op = tensor.op
    if op.type == "Const":
        return not np.any(tf.get_static_value(tensor))
    if op.type in _PRODUCTS:
        return any(map(is_zero, op.inputs))
    if op.type in _SUMS:
        return all(map(is_zero, op.inputs))
    return op.type in _LINEAR | _QUOTIENTS and is_zero(op.inputs[0])


def _is_sum(tensor: tf.Tensor) -> bool:
    dtype = tensor.dtype
    numbers = dtype.is_floating or dtype.is_complex or dtype.is_bool
    return bool(numbers and tensor.shape.is_fully_defined())


def _following_in(body: tf.Graph, op: tf.Operation, follows: set[Any]) -> set[Any]:
    pairs = [*zip(body.inputs, op.inputs, strict=True)]
    sized = [inner for inner, outer in pairs if Sized(outer.op) in follows]
    return following(body, [inner for inner, outer in pairs if _follows(outer, follows)], sized)


def _is_linear(op: tf.Operation, follows: set[Any]) -> bool:
    given = [i for i, tensor in enumerate(op.inputs) if _follows(tensor, follows)]
    shape = op.outputs[0].shape
    if op.type in _SUMS and shape.rank is not None and not shape.is_fully_defined():
        return False  # these are given what all of them add up to
    if (body := body_of(op)) is not None:
        return nonlinear(body.outputs, _following_in(body, op, follows)) is None
    if (op.type in _BRANCHES and 0 in given) or _averages_some(op, follows):
        return False
    return (
        op.type in _LINEAR
        or ((op.type in _PRODUCTS or _GRADIENTS.search(op.type)) and len(given) == 1)
        or (op.type in _QUOTIENTS and given == [0])
        or (op.type in _CHOICES and 0 not in given)
        or any(value.HasField("func") for value in op.node_def.attr.values())
    )
