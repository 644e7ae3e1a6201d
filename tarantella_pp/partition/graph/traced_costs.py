"""What traced operations of TensorFlow cost: arithmetic, and what their gradients need again.

So the inside of a layer gives its price, without a rule for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tarantella_pp.internals.training import body_of
from tarantella_pp.partition.graph.flops import by_name, einsum_flops

#: Operations whose result is in the memory of what they are given.
_VIEWS = {"Reshape", "Identity", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"}
#: Steps for each number that is made; all others that make floating point numbers take one.
_STEPS = by_name(
    {
        0: "Const Placeholder Reshape Identity ExpandDims Squeeze StopGradient PreventGradient Cast"
        " Transpose ConcatV2 Pack Unpack StridedSlice Slice Split SplitV GatherV2 ResourceGather"
        " BroadcastTo Tile Pad PadV2 MirrorPad Fill Range Shape OneHot ReverseV2 Roll ZerosLike"
        " OnesLike ReadVariableOp SpaceToBatchND BatchToSpaceND SpaceToDepth DepthToSpace GatherNd"
        " ScatterNd TensorScatterUpdate IdentityN",
        4: "Exp Log Log1p Expm1 Sqrt Rsqrt Pow Sin Cos Sigmoid Selu Elu Softplus Softsign",
        5: "Softmax LogSoftmax",
        6: "Tanh Erf Erfc",
        8: "FusedBatchNormV3",
    }
)
_REDUCTIONS = by_name(
    {True: "Sum Mean Max Min Prod Any All ArgMax ArgMin Cumsum L2Loss AvgPool MaxPool"}
)
#: What is kept for the gradient: what goes in, what comes out, the factors of others that have a
#: gradient, or a condition.
_KEPT = by_name(
    {
        "in": "Square Sin Cos Erf Log Log1p LeakyRelu Abs Pow Softplus Softsign L2Loss Max Min Prod"
        " FusedBatchNormV3 Maximum Minimum AvgPool3D",
        "out": "Exp Expm1 Sqrt Rsqrt Tanh Sigmoid Softmax LogSoftmax Relu Relu6 Elu Selu Reciprocal"
        " Inv",
        "both": "MaxPool MaxPool3D",
        "factors": "Mul MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv2D Conv3D"
        " DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2 RealDiv DivNoNan Xdivy",
        "condition": "SelectV2 Select GatherV2 ResourceGather GatherNd",
    }
)
_CONVOLUTIONS = {"Conv2D": 0, "Conv3D": 0, "Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2}
#: Operations that nothing but running them shows the costs of.
_UNKNOWN = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PyFunc")


@dataclass(frozen=True)
class NodeCost:
    """What a node costs for one sample."""

    flops: float
    # What it reads and makes that its backward pass needs again, as the graph calls it
    keeps: tuple[Any, ...]
    residual_bytes: float  # of what else it keeps
    is_guess: bool


class Priced:
    """The operations of a graph that computes `samples` samples, with their costs."""

    def __init__(self, operations: Sequence[Any], given: dict[Any, bool], samples: int) -> None:
        """`given` says of placeholders whether they have a gradient."""
        self._samples = samples
        self._operations = operations
        self._flows: dict[Any, bool] = dict(given)
        for op in operations:
            moved = op.type != "StopGradient" and any(self.flows(t) for t in op.inputs)
            for tensor in op.outputs:
                if moved and (tensor.dtype.is_floating or tensor.dtype.is_complex):
                    self._flows[tensor.ref()] = True

    def flows(self, tensor: Any) -> bool:
        """Whether a tensor has a gradient."""
        return self._flows.get(tensor.ref(), False)

    def of(self, places: Iterable[int], weights: set[Any], memory: dict[Any, Any]) -> NodeCost:
        """What some operations cost; `weights` are in memory anyway.

        `memory` has names of tensors by the memory that they are in.
        """
        operations = [self._operations[place] for place in places]
        kept: dict[Any, float] = {}
        for op in operations:
            for tensor in self._kept(op) if any(map(self.flows, op.outputs)) else ():
                held = memory_of(tensor)
                if held.ref() not in weights and held.op.type != "Const":
                    kept[held.ref()] = _size(held) * held.dtype.size / self._samples
        return NodeCost(
            sum(map(_flops, operations)) / self._samples,
            tuple(memory[ref] for ref in kept if ref in memory),
            sum(size for ref, size in kept.items() if ref not in memory),
            any(op.type in _UNKNOWN for op in operations),
        )

    def _kept(self, op: Any) -> list[Any]:
        how = _KEPT.get(op.type)
        if how == "in":
            return [op.inputs[0]]
        if how == "out":
            return [op.outputs[0]]
        if how == "both":
            return [op.inputs[0], op.outputs[0]]
        if how == "condition":
            return [op.inputs[0 if op.type.startswith("Select") else 1]]
        if how == "factors":
            flowing = [self.flows(tensor) for tensor in op.inputs]
            return [t for t, flows in zip(op.inputs, flowing, strict=True) if sum(flowing) > flows]
        return []


def memory_of(tensor: Any) -> Any:
    """The tensor that has the memory of another one."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


def _flops(op: Any) -> float:
    body = body_of(op)
    if body is not None:
        return sum(map(_flops, body.get_operations()))
    if op.type in _UNKNOWN:  # as recurrent layers do: products of matrices at each position
        matrices = sum(_size(tensor) for tensor in op.inputs if tensor.shape.rank == 2)
        return 2.0 * matrices * _steps_of(op)
    made = op.outputs[0] if op.outputs else None
    if made is None or not (made.dtype.is_floating or made.dtype.is_complex or made.dtype.is_bool):
        return 0.0
    if op.type in _CONVOLUTIONS:
        where = op.inputs[2] if _CONVOLUTIONS[op.type] else made
        kernel = op.inputs[1].shape
        return float(2 * _size(where) * _size(op.inputs[1]) / (kernel[-1] or 1))
    if op.type == "DepthwiseConv2dNative":
        return float(2 * _size(made) * math.prod(list(op.inputs[1].shape)[:2]))
    if op.type in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        turned = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        return float(2 * _size(made) * (op.inputs[0].shape[-2 if turned else -1] or 1))
    if op.type == "Einsum":
        shapes = [tuple(size or 1 for size in t.shape) for t in op.inputs]
        return einsum_flops(op.get_attr("equation").decode(), shapes)
    if op.type in _REDUCTIONS:
        return float(_size(op.inputs[0]))
    return float(_STEPS.get(op.type, 1) * _size(made))


def _size(tensor: Any) -> int:
    known = () if tensor.shape.rank is None else tensor.shape.as_list()
    return math.prod(size or 1 for size in known)


def _steps_of(op: Any) -> int:
    """About how often a loop runs, over what is given to it."""
    sequences = [t.shape for t in op.inputs if t.shape.rank == 3]
    return max((shape[1] or 1 for shape in sequences), default=1)
