"""The private names of tf.data that looking into a data set needs, all in this one file.

`tests/keras_internals/test_tf_datasets.py` says which of them a new version of TensorFlow has
changed. Whatever else is not as expected makes a data set one that is not looked into.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

Nodes = dict[str, list[tuple[str, bytes]]]
_CALLS = {"If", "While", "Case", "StatefulPartitionedCall"}  # what they call is looked at as well
_HARMLESS = {"Assert", "CheckNumerics", "CheckNumericsV2", "PrintV2"}
_UNSURE = ("Generator", "Random", "Shuffle", "Sample", "Snapshot", "Cache", "Anonymous")


def kind_of(dataset: Any) -> str:
    """What a data set does: the name of its class, such as `ParallelMapDataset`."""
    return type(dataset).__name__.lstrip("_")


def inputs_of(dataset: Any) -> list[Any]:
    """The data sets that it reads."""
    return list(dataset._inputs())


def every_dataset(dataset: Any) -> Iterator[Any]:
    """A data set, and all that it reads."""
    yield dataset
    for below in inputs_of(dataset):
        yield from every_dataset(below)


def number_of(dataset: Any, name: str) -> int:
    """A number that a data set was made with: `count`, `buffer_size`, `seed`, `batch_size`..."""
    return int(getattr(dataset, f"_{name}"))


def may_change_order(dataset: Any) -> bool:
    """Whether a parallel step was told that the order does not matter."""
    return getattr(dataset, "_deterministic", "default") in ("false", False)


def stateful_operations(dataset: Any) -> set[str]:
    """What the functions of a data set do that may be different the next time."""
    found = {
        operation
        for function in dataset._functions()
        for nodes in _nodes(function.function.graph).values()
        for operation, _ in nodes
    }
    return {operation for operation in found - _CALLS - _HARMLESS if _is_stateful(operation)}


def caches_an_order(dataset: Any) -> bool:
    """Whether a cache keeps what the first pass has drawn, so that all have the same."""
    caches = (each for each in every_dataset(dataset) if kind_of(each) == "CacheDataset")
    below = (each for cache in caches for each in every_dataset(cache))
    return any(kind_of(each) == "ShuffleDataset" or stateful_operations(each) for each in below)


def function_hash(dataset: Any) -> int:
    """A number that is the same for the same functions with the same captured tensors."""
    found = 0
    for wrapper in dataset._functions():
        nodes = _nodes(wrapper.function.graph)
        bodies = sorted(zlib.crc32(repr(body).encode()) for body in nodes.values())
        found = zlib.crc32(repr(bodies).encode(), found)
        for tensor in wrapper.function.captured_inputs:
            known = tensor.dtype not in (tf.resource, tf.variant)
            found = zlib.crc32(tf.io.serialize_tensor(tensor).numpy() if known else b"", found)
    return found


def mapping_of(dataset: Any) -> Callable[[Any], Any]:
    """The function of a data set that maps, from an element to an element; not traced again."""
    (wrapper,) = dataset._functions()

    def apply(element: Any) -> Any:
        tensors = structure.to_tensor_list(wrapper._input_structure, element)
        outputs = wrapper.function(*tensors)
        return structure.from_compatible_tensor_list(wrapper.output_structure, outputs)

    return apply


def _is_stateful(operation: str) -> bool:
    known = op_def_registry.get(operation)
    if known is None:
        return True
    if "Dataset" in operation:  # TensorFlow calls all of them stateful
        return any(word in operation for word in _UNSURE)
    return bool(known.is_stateful)


def _nodes(graph: Any) -> Nodes:
    """The operations of a function and of all that it calls, with what makes each what it is."""
    definition = graph.as_graph_def()
    bodies = {"": definition.node}
    bodies |= {each.signature.name: each.node_def for each in definition.library.function}
    return {name: [(node.op, _identity(node)) for node in body] for name, body in bodies.items()}


def _identity(node: Any) -> bytes:
    """A node without the names of functions, which are numbered."""
    named = {name: value for name, value in node.attr.items() if not name.startswith("_")}
    plain = [
        name.encode() + value.SerializeToString(deterministic=True)
        for name, value in sorted(named.items())
        if not value.HasField("func")
    ]
    return b"|".join([node.name.encode(), *map(str.encode, node.input), *plain])
