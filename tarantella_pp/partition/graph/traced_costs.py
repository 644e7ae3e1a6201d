"""Traced operations of TensorFlow: what they follow from, and what they cost.

Costs are arithmetic, and what gradients need again. So the inside of a layer gives its price,
without a rule for each layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tarantella_pp.internals.training import body_of, step_of
from tarantella_pp.partition.graph.least_kept import Operation

Named = TypeVar("Named")


def by_name(groups: Mapping[Named, str]) -> dict[str, Named]:
    """Turns a value with the names it holds for into the value of each name."""
    return {name: value for value, names in groups.items() for name in names.split()}


#: Operations whose result is in the memory of what they are given.
_VIEWS = {
    *("Reshape", "Identity", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"),
    "IdentityN",  # each output of its own input
}
#: Steps for each number that is made; all others that make floating point numbers take one.
_STEPS = by_name(
    {
        0: "Const Placeholder Reshape Identity ExpandDims Squeeze StopGradient PreventGradient Cast"
        " Transpose ConcatV2 Pack Unpack StridedSlice Slice Split SplitV GatherV2 ResourceGather"
        " BroadcastTo Tile Pad PadV2 MirrorPad Fill Range Shape OneHot ReverseV2 Roll ZerosLike"
        " OnesLike ReadVariableOp SpaceToBatchND BatchToSpaceND SpaceToDepth DepthToSpace GatherNd"
        " ScatterNd TensorScatterUpdate IdentityN ResizeNearestNeighbor",
        4: "Exp Log Log1p Expm1 Sqrt Rsqrt Pow Sin Cos Sigmoid Selu Elu Softplus Softsign",
        5: "Softmax LogSoftmax",
        6: "Tanh Erf Erfc",
        8: "FusedBatchNormV3 ResizeBilinear",
    }
)
_REDUCTIONS = by_name(
    {True: "Sum Mean Max Min Prod Any All ArgMax ArgMin Cumsum L2Loss AvgPool MaxPool"}
)
#: What is kept for the gradient: what goes in, what comes out, the factors of others that have a
#: gradient, a condition, or what the gradient takes from what goes in: as many numbers or booleans.
_KEPT = by_name(
    {
        "in": "Square LeakyRelu Softsign L2Loss Max Min Prod FusedBatchNormV3 AvgPool3D",
        "out": "Exp Sqrt Rsqrt Tanh Sigmoid Softmax Relu Relu6 Elu Selu Reciprocal Inv",
        "both": "MaxPool MaxPool3D",
        "factors": "Mul MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv2D Conv3D"
        " DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2 RealDiv DivNoNan Xdivy",
        "condition": "SelectV2 Select GatherV2 ResourceGather GatherNd",
        "numbers": "LogSoftmax Sin Cos Erf Erfc Log Log1p Expm1 Abs Pow Softplus",
        "booleans": "Maximum Minimum",
    }
)
_CONVOLUTIONS = {"Conv2D": 0, "Conv3D": 0, "Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2}
#: Parts of the types of operations that are dear to run again; a function or a loop may hold some.
_DEAR = ("MatMul", "Conv", "Einsum", "Pool", "Call", "While", "If", "Case")
#: FLOPs of a product in the time in which one byte is read or written, and one number in it made.
FLOPS_PER_MOVE = 10
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
    # Its operations, for one sample, and which of their values gradients read; values of the graph
    # are called as it calls them
    operations: tuple[Operation, ...] = ()
    needed: tuple[Hashable, ...] = ()


class Priced:
    """The operations of a graph that computes `samples` samples, with their costs."""

    def __init__(
        self, operations: Sequence[Any], given: dict[Any, bool], weights: set[Any], samples: int
    ) -> None:
        """`given` says of placeholders whether they have a gradient."""
        self._samples = samples
        self._operations = operations
        self._flows: dict[Any, bool] = dict(given)
        # What follows from weights and constants alone, and so is made again, never kept
        self._fixed = {ref.deref().op for ref in weights}
        for op in operations:
            if op.type != "Placeholder" and all(t.op in self._fixed for t in op.inputs):
                self._fixed.add(op)
            moved = op.type != "StopGradient" and any(self.flows(t) for t in op.inputs)
            for tensor in op.outputs:
                if moved and (tensor.dtype.is_floating or tensor.dtype.is_complex):
                    self._flows[tensor.ref()] = True

    def flows(self, tensor: Any) -> bool:
        """Whether a tensor has a gradient."""
        return self._flows.get(tensor.ref(), False)

    def of(self, places: Iterable[int], memory: dict[Any, Any]) -> NodeCost:
        """What some operations cost; `memory` has names of tensors by the memory they are in."""
        operations = [self._operations[place] for place in places]
        kept: dict[Any, float] = {}
        more = 0.0
        steps: list[Operation] = []
        needed: dict[Hashable, None] = {}

        def name(tensor: Any) -> Hashable:
            held = memory_of(tensor)
            known: Hashable = memory.get(held.ref(), held.name)
            return known

        for op in operations:
            if op not in self._fixed and op.type not in (*_VIEWS, "Placeholder"):
                steps += operations_of(op, name, self._fixed.__contains__, self._samples)
            if any(map(self.flows, op.outputs)):
                besides = _kept_besides(op, self._samples)
                more += besides
                if besides and op.type in _UNKNOWN:  # whatever it keeps nothing makes again
                    steps.append(Operation((), ((op.name, besides / self._samples),)))
                    needed[op.name] = None
                elif besides and memory_of(op.inputs[0]).op not in self._fixed:
                    needed[name(op.inputs[0])] = None
                for held in map(memory_of, self._kept(op)):
                    if held.op not in self._fixed:
                        kept[held.ref()] = bytes_of(held) / self._samples
                        needed[name(held)] = None
        return NodeCost(
            sum(map(_flops, operations)) / self._samples,
            tuple(memory[ref] for ref in kept if ref in memory),
            sum(size for ref, size in kept.items() if ref not in memory) + more / self._samples,
            any(op.type in _UNKNOWN for op in operations),
            tuple(steps),
            tuple(needed),
        )

    def _kept(self, op: Any) -> list[Any]:
        how = _KEPT.get(op.type)
        if how == "condition":
            return [op.inputs[0 if op.type.startswith("Select") else 1]]
        if how == "factors":
            flowing = [self.flows(tensor) for tensor in op.inputs]
            return [t for t, flows in zip(op.inputs, flowing, strict=True) if sum(flowing) > flows]
        given = op.inputs[:1] if how in ("in", "both") else ()
        made = op.outputs[:1] if how in ("out", "both") else ()
        return [*given, *made]


def frontier(wanted: Iterable[Any], is_given: Callable[[Any], bool]) -> tuple[list[Any], set[Any]]:
    """Walks back from tensors to what is given: returns that, and the operations in between."""
    given: list[Any] = []
    run: set[Any] = set()
    todo = list(wanted)
    while todo:
        tensor = todo.pop()
        if is_given(tensor):
            given.append(tensor)
        elif tensor.op not in run:
            run.add(tensor.op)
            todo += tensor.op.inputs
    return given, run


def memory_of(tensor: Any) -> Any:
    """The tensor that has the memory of another one."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _kept_besides(op: Any, samples: int) -> float:
    """Bytes that a gradient takes from what an operation is given, and keeps in its place."""
    how = _KEPT.get(op.type)
    if how == "numbers":
        return bytes_of(op.inputs[0])
    if how == "booleans":
        return float(_size(op.outputs[0]))
    if op.type not in _UNKNOWN:
        return 0.0
    # As recurrent layers do: some vectors of the size of each state, at each position.
    states = [t for t in op.inputs if t.shape.rank == 2 and t.shape[0] == samples]
    return 4.0 * _steps_of(op) * sum(map(bytes_of, states))


def operations_of(
    op: Any, name: Callable[[Any], Hashable], is_left_out: Callable[[Any], bool], samples: int = 1
) -> list[Operation]:
    """An operation as `least_kept` takes it, without the values that are left out."""
    made = [(name(tensor), bytes_of(tensor) / samples) for tensor in op.outputs]
    # What reads the handle of a variable is stateful: it never runs again, and needs none.
    read = [(name(t),) * (t.dtype.name != "resource" and not is_left_out(t.op)) for t in op.inputs]
    if op.type == "IdentityN":  # each output has the memory of its own input
        return [Operation(held, (one,), 0.0) for held, one in zip(read, made, strict=True)]
    made = [one for one, t in zip(made, op.outputs, strict=True) if t.dtype.name != "resource"]
    dear = any(part in op.type for part in _DEAR)
    moved = sum(map(bytes_of, [*op.inputs, *op.outputs]))
    flops = math.inf
    if op.type in _VIEWS:
        flops = 0.0
    elif op.type != "Placeholder" and op.op_def is not None and not op.op_def.is_stateful:
        flops = (1 if dear else FLOPS_PER_MOVE) * _flops(op) + FLOPS_PER_MOVE * moved
    return [Operation(tuple(itertools.chain(*read)), tuple(made), flops / samples, dear)]


def _flops(op: Any) -> float:
    if (body := body_of(op) or step_of(op)) is not None:
        return _steps_of(op) * sum(map(_flops, body.get_operations()))
    made = op.outputs[0] if op.outputs else None
    numbers = [made, *op.inputs] if made is not None and made.dtype.is_bool else [made]
    if not any(t is not None and (t.dtype.is_floating or t.dtype.is_complex) for t in numbers):
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
    if op.type == "Einsum" and all(t.shape.rank is not None for t in op.inputs):
        shapes = [tuple(size or 1 for size in t.shape) for t in op.inputs]
        return einsum_flops(op.get_attr("equation").decode(), shapes)
    if op.type in _REDUCTIONS:
        return float(_size(op.inputs[0]))
    return float(_STEPS.get(op.type, 1) * _size(made))


def _size(tensor: Any) -> int:
    known = () if tensor.shape.rank is None else tensor.shape.as_list()
    return math.prod(size or 1 for size in known)


def einsum_flops(equation: str, shapes: list[tuple[int, ...]]) -> float:
    """Counts the operations of an einsum of two or more tensors."""
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.split("->")[0].split(","), shapes, strict=True):
        term = term.strip()
        before, _, after = term.partition("...")
        if "..." in term:
            middle = shape[len(before) : len(shape) - len(after)]
            sizes["..."] = max(sizes.get("...", 1), math.prod(middle))
            shape = (*shape[: len(before)], *shape[len(shape) - len(after) :])
        for letter, size in zip(before + after, shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return 2.0 * math.prod(sizes.values())


def bytes_of(tensor: Any) -> float:
    """Bytes of a tensor, unknown sizes as one; a list of a loop as what was put in it."""
    if tensor.dtype.name == "variant":
        return sum(map(bytes_of, tensor.op.inputs))
    return float(_size(tensor) * (tensor.dtype.size or 0))


def _steps_of(op: Any) -> int:
    """About how often a loop runs, over the lists given to it; once for all else."""
    lists = [t.op for t in op.inputs if t.op.type == "TensorListFromTensor" and step_of(op)]
    return max((made.inputs[0].shape[0] or 1 for made in lists), default=1)
