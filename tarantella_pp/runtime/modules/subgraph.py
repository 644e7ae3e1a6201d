"""Parts of a traced graph: what depends on what, and parts carved out to be called elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from tarantella_pp.runtime.modules.graph_split import Trace

NOTHING: Mapping[str, Iterable[str]] = MappingProxyType({})
"""No operation waits for one that it is given nothing by."""


class SubgraphExtractor:
    """Makes callable parts of one traced graph, with TensorFlow's public graph import.

    `tf.compat.v1.WrappedFunction.prune` would do much the same, but it copies the ancestors of
    feeds as well, and with them writes of variables that must happen only once.
    """

    def __init__(self, function: Any) -> None:
        self._definition = function.graph.as_graph_def(add_shapes=False)
        self._nodes = {node.name: node for node in self._definition.node}
        captured = function.captured_inputs
        places = function.inputs[len(function.inputs) - len(captured) :]
        self._captures = {_name(p): value for p, value in zip(places, captured, strict=True)}

    def extract(
        self,
        feeds: Sequence[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation] = (),
        first: Mapping[str, Iterable[str]] = NOTHING,
    ) -> Callable[..., list[tf.Tensor]]:
        """Makes a part callable."""
        fed = [_name(tensor) for tensor in feeds]
        names = [_name(tensor) for tensor in fetches]
        inner = [name for name in dict.fromkeys(names) if name not in fed]
        wanted = [*inner, *(f"{op.name}:0" for op in effects)]
        nodes, used = self._needed(wanted, {*fed, *self._captures})
        part = self._part(nodes, first)

        def call(*values: tf.Tensor) -> list[tf.Tensor]:
            given = dict(zip(fed, values, strict=True))
            graph = tf.compat.v1.get_default_graph()
            known = {n: graph.capture(v) for n, v in self._captures.items() if n in used}
            known |= {name: value for name, value in given.items() if name in used}
            imported = tf.graph_util.import_graph_def(
                part, input_map=known, return_elements=inner, name="part"
            )
            given |= dict(zip(inner, imported, strict=True))
            return [given[name] for name in names]

        return call

    def _needed(self, wanted: Iterable[str], given: set[str]) -> tuple[set[str], set[str]]:
        """Names of the nodes above `wanted` and below `given`, and which of `given` they use."""
        nodes: set[str] = set()
        used: set[str] = set()
        todo = list(wanted)
        while todo:
            tensor = todo.pop()
            if tensor in given:
                used.add(tensor)
                continue
            name = tensor.rsplit(":", 1)[0]
            if name not in nodes:
                nodes.add(name)
                todo += [_full(i) for i in self._nodes[name].input if not i.startswith("^")]
        return nodes, used

    def _part(self, names: set[str], first: Mapping[str, Iterable[str]]) -> Any:
        """The graph definition of some nodes; order constraints from outside are dropped."""
        part = tf.compat.v1.GraphDef()
        part.versions.CopyFrom(self._definition.versions)
        part.library.CopyFrom(self._definition.library)
        for node in self._definition.node:
            if node.name in names:
                copy = part.node.add()
                copy.CopyFrom(node)
                kept = [i for i in node.input if not i.startswith("^") or i[1:] in names]
                del copy.input[:]
                before = [f"^{name}" for name in first.get(node.name, ()) if name in names]
                copy.input.extend([*kept, *before])
                copy.attr.pop("_class", None)  # asks to stay beside nodes of another part
        return part


def _name(tensor: tf.Tensor) -> str:
    return f"{tensor.op.name}:{tensor.value_index}"


def _full(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def dependents(seeds: Iterable[tf.Tensor], operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns all operations that depend on some tensors."""
    after = {seed.op for seed in seeds}
    for op in operations:
        if any(t.op in after for t in op.inputs) or any(c in after for c in op.control_inputs):
            after.add(op)
    return after


def ancestors(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Returns all operations that some tensors depend on, or that have to run before them."""
    seen: set[tf.Operation] = set()
    todo = [tensor.op for tensor in tensors]
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return seen


def frontier(
    wanted: Iterable[tf.Tensor], is_given: Callable[[tf.Tensor], bool]
) -> tuple[list[tf.Tensor], set[tf.Operation]]:
    """Returns what some tensors are computed from."""
    given: list[tf.Tensor] = []
    run: set[tf.Operation] = set()
    todo = list(wanted)
    while todo:
        tensor = todo.pop()
        if is_given(tensor):
            given.append(tensor)
        elif tensor.op not in run:
            run.add(tensor.op)
            todo += tensor.op.inputs
    return given, run


def in_order(
    tensors: Iterable[tf.Tensor], order: Mapping[tf.Operation, int]
) -> tuple[tf.Tensor, ...]:
    """Returns each tensor once, in the order in which they were made."""
    unique = {tensor.ref(): tensor for tensor in tensors}.values()
    return tuple(sorted(unique, key=lambda t: (order[t.op], t.value_index)))


_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Cheap enough to repeat in the backward pass when nothing but weights goes in.
_REPEATABLE = {
    *("Const", "Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "Shape", "Transpose"),
    *("StridedSlice", "Pack", "Prod", "ConcatV2", "Range", "Fill", "Sub", "Add", "AddV2", "Mul"),
}


class DependsOnlyOnWeights:
    """Whether an operation depends on nothing but constants and weights that F does not write."""

    def __init__(self, trace: Trace) -> None:
        operations = trace.function.graph.get_operations()
        self._written = {op.inputs[0].ref() for op in operations if op.type in _WRITES}
        self._fed = {tensor.op for tensor in trace.inputs}
        self._known: dict[tf.Operation, bool] = {}

    def __call__(self, op: tf.Operation) -> bool:
        """Tells it of an operation."""
        if op not in self._known:
            self._known[op] = self._decide(op)
        return self._known[op]

    def _decide(self, op: tf.Operation) -> bool:
        if op.type == "Placeholder":
            return op not in self._fed
        if op.type == "ReadVariableOp":
            return op.inputs[0].ref() not in self._written and self(op.inputs[0].op)
        return op.type in _REPEATABLE and all(self(tensor.op) for tensor in op.inputs)


def is_recomputable(
    trace: Trace, depends_only_on_weights: DependsOnlyOnWeights
) -> Callable[[tf.Operation], bool]:
    """Tells which operations give the same again once the stage's inputs are there."""
    fed = {tensor.op for tensor in trace.inputs}

    def pure(op: tf.Operation) -> bool:
        stateful = op.op_def is None or op.op_def.is_stateful
        return depends_only_on_weights(op) or not (op in fed or stateful)

    return pure
