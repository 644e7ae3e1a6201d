"""Carves parts out of a traced graph, to be called inside other TensorFlow functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

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
