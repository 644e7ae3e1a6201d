"""Values of all ranks combined or made equal, for training loops of the user's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.weights.shared_weights import broadcast_variable

_OPERATIONS = ("sum", "mean", "max", "min")


def allreduce(tensors: Any, op: str = "sum") -> Any:
    """Combines the values of all ranks, and returns the result on every rank.

    All ranks of the job must call it, with values of the same structure, shapes and dtypes. The
    result has the same bits on all of them. Under plain `python` it is what was given. Call it
    eagerly: messages between ranks are no part of a `tf.function`.

    Args:
        tensors: A tensor, variable, NumPy array or Python number, or any nest of them in dicts,
            lists and tuples. Slices of embeddings count as dense tensors.
        op: `"sum"`, `"mean"`, `"max"` or `"min"`, of each element over the ranks. The mean of
            integers is a float64.

    Returns:
        The same structure: tensors for tensors and variables, arrays for arrays, Python numbers
        for Python numbers.

    Raises:
        ConfigurationError: Another `op`, values that are no numbers, or a call within a
            `tf.function`; on all ranks, if they do not make the same call.

    Example::

        loss = tnt.allreduce(loss, op="mean")
        counts = tnt.allreduce({"right": right, "all": len(labels)})
    """
    refuse_in_graph("tnt.allreduce")
    if op not in _OPERATIONS:
        raise ConfigurationError(
            f"op is one of {', '.join(map(repr, _OPERATIONS))}. Received: op={op!r}"
        )
    ranks = world()
    leaves = keras.tree.flatten(tensors)
    arrays = [_array(leaf) for leaf in leaves]
    specs = keras.tree.pack_sequence_as(tensors, [f"{a.dtype}{[*a.shape]}" for a in arrays])
    with ranks.call("tnt.allreduce", op=op, tensors=specs):
        reduction, label = "sum" if op == "mean" else op, f"tnt.allreduce ({op})"
        started = [
            ranks.start_allreduce(array, reduction, tag=tag, label=label)
            for tag, array in enumerate(arrays)
        ]
        combined = [request.wait() for request in started]
    if op == "mean":
        combined = [
            (array / ranks.size).astype(array.dtype if array.dtype.kind not in "iub" else float)
            for array in combined
        ]
    results = [_like(leaf, array) for leaf, array in zip(leaves, combined, strict=True)]
    return keras.tree.pack_sequence_as(tensors, results)


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Gives the variables of all ranks the values that they have on one rank.

    All ranks of the job must call it: before the first step of a training loop, so that all
    begin with the same weights.

    Args:
        variables: Keras or TensorFlow variables, in the same order on all ranks: a model's,
            and a built optimizer's.
        root: The rank whose values all get.

    Raises:
        ConfigurationError: No such rank, or a call within a `tf.function`; on all ranks, if they
            do not make the same call with variables of the same shapes and dtypes.

    Example::

        optimizer.build(model.trainable_variables)
        tnt.broadcast_variables(model.variables + optimizer.variables)
    """
    refuse_in_graph("tnt.broadcast_variables")
    ranks, variables = world(), list(variables)
    if root not in range(ranks.size):
        raise ConfigurationError(
            f"root is a rank from 0 to {ranks.size - 1}. Received: root={root!r}"
        )
    specs = [f"{variable.dtype}{[*variable.shape]}" for variable in variables]
    with ranks.call("tnt.broadcast_variables", root=root, variables=specs):
        for variable in variables:
            broadcast_variable(variable, root, ranks)


def refuse_in_graph(name: str) -> None:
    """Refuses a call while TensorFlow traces a function."""
    if not tf.executing_eagerly():
        raise ConfigurationError(
            f"{name} is called within a `tf.function`, where messages between ranks would be sent "
            "once, while it is traced, or hold up TensorFlow's threads. Compute losses and "
            "gradients in the `tf.function`, return them, and call it outside; with "
            "`keras.Model.fit`, compile the model with `run_eagerly=True`."
        )


def _array(value: Any) -> np.ndarray[Any, Any]:
    """A leaf as an array, on its own memory where possible."""
    if isinstance(value, (keras.Variable, tf.Variable, tf.IndexedSlices)):
        value = tf.convert_to_tensor(value)
    array = to_buffer(value) if isinstance(value, tf.Tensor) else np.asarray(value)
    if isinstance(value, bool):
        array = np.asarray(int(value))
    if array.dtype.kind in "OSU" or isinstance(value, keras.KerasTensor):
        raise ConfigurationError(
            "tnt.allreduce combines tensors, variables, arrays and numbers. "
            f"Received: {type(value).__name__} {value!r}"
        )
    return array


def _like(value: Any, array: np.ndarray[Any, Any]) -> Any:
    """A result as the kind of thing that was given."""
    if isinstance(value, (tf.Tensor, tf.Variable, keras.Variable, tf.IndexedSlices)):
        return to_tensor(array)
    return np.array(array) if isinstance(value, np.ndarray) else array[()].item()
