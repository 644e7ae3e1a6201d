"""A layer graph while it is being read: tensors and calls as they are found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import keras
import msgspec

from tarantella_pp.partition.extraction.rows import (
    Probe,
    rows_per_sample,
    sample_axis,
)
from tarantella_pp.partition.graph.layer_graph import Tensor
from tarantella_pp.partition.graph.units import Shape


@dataclass(frozen=True, slots=True)
class Call:
    """How to run one node of the graph.

    With `values` holding a tensor per tensor id, and `masks` the mask each was made with, the node
    runs, once the mask of each input `t` is set to `None if t in call.unmasked else masks[t]`, as
    `args, kwargs = call.arguments.fill_in({k: values[t] for k, t in call.bindings.items()})`,
    `result = operation_fn(call.operation, training=training)(*args, **kwargs)`, and
    `keras.tree.flatten(result)` are the values of `call.outputs`. `training` must be a bool:
    the one baked into the arguments is that of the day the model was built.

    Attributes:
        name: Unique name of the node.
        operation: The layer or other Keras operation to call; the user's own object.
        arguments: The symbolic arguments it was called with (`Node.arguments` of Keras).
        bindings: From `id` of each symbolic tensor in `arguments` to the id of a graph's tensor.
        outputs: Ids of the tensors it makes, in the order of the flattened result.
        variables: The Keras variables it uses, seeds of random layers included.
        unmasked: Ids of the inputs that it must see without the mask they were made with: an
            earlier call has deleted it, in place.
    """

    name: str
    operation: Any
    arguments: Any
    bindings: dict[int, int]
    outputs: tuple[int, ...]
    variables: tuple[Any, ...]
    unmasked: frozenset[int] = frozenset()

    @property
    def inputs(self) -> tuple[int, ...]:
        """Ids of the tensors it reads, each once, in the order of its arguments."""
        return tuple(dict.fromkeys(self.bindings.values()))


class GraphBuilder:
    """Collects the tensors and calls of a model in the order in which Keras runs them.

    Attributes:
        tensors: The tensors found so far; an id is a position. What follows from all calls
            together, such as who reads them, is filled in by `graph_of`.
        probes: The shapes of each for two numbers of samples; `None` where they cannot be told.
        calls: The calls found so far.
        unmasked: Ids of the tensors whose masks a call has deleted.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.probes: list[Probe] = []
        self.calls: list[Call] = []
        self.unmasked: set[int] = set()
        self._names: Counter[str] = Counter()

    def add_tensor(
        self,
        name: str,
        shape: Shape,
        dtype: str,
        mask_shape: Shape | None = None,
        *,
        probe: Probe,
    ) -> int:
        """Adds a tensor and returns its id."""
        tensor = Tensor(
            id=len(self.tensors),
            name=name,
            shape=shape,
            dtype=dtype,
            mask_shape=mask_shape,
            rows_per_sample=rows_per_sample(probe),
            sample_axis=sample_axis(probe),
        )
        self.tensors.append(tensor)
        self.probes.append(probe)
        return tensor.id

    def unique_name(self, path: str) -> str:
        """Returns the path itself the first time, then `"path:1"`, `"path:2"` and so on."""
        name = path
        while self._names[name]:
            name = f"{path}:{self._names[path]}"
            self._names[path] += 1
        self._names[name] += 1
        return name

    def pruned(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[GraphBuilder, list[int]]:
        """Leaves out operations whose results nobody reads, and numbers the tensors anew.

        Opening a nested model leaves such operations behind: those that computed a mask which
        the opened layers now find on the tensor itself. A layer is never left out; it may have
        losses or statistics.
        """
        needed = set(inputs) | set(outputs)
        calls = []
        for call in reversed(self.calls):
            if isinstance(call.operation, keras.layers.Layer) or needed & set(call.outputs):
                needed.update(call.inputs, call.outputs)
                calls.append(call)
        numbers = [-1] * len(self.tensors)
        result = GraphBuilder()
        for old in sorted(needed):
            numbers[old] = len(result.tensors)
            result.tensors.append(msgspec.structs.replace(self.tensors[old], id=numbers[old]))
            result.probes.append(self.probes[old])
        for call in reversed(calls):
            result.calls.append(
                Call(
                    name=call.name,
                    operation=call.operation,
                    arguments=call.arguments,
                    bindings={key: numbers[t] for key, t in call.bindings.items()},
                    outputs=tuple(numbers[t] for t in call.outputs),
                    variables=call.variables,
                    unmasked=frozenset(numbers[t] for t in call.unmasked),
                )
            )
        return result, numbers
