"""What training loops of the user's own call on all ranks: values combined, gradients averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import scaled
from tarantella_pp.internals.state import class_before
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.weights.gradient_reduction import GradientReduction, in_buckets
from tarantella_pp.runtime.weights.shared_weights import broadcast_variable
from tarantella_pp.runtime.weights.slices import Gradient

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


def DistributedOptimizer(  # noqa: N802 - the name that it has in Horovod
    optimizer: Any,
    op: str = "mean",
    *,
    fusion_threshold: int | float | str | None = None,
    wire_dtype: str | None = None,
) -> Any:
    """Makes an optimizer average the gradients of all ranks before it applies them.

    For training loops of your own with a `tf.GradientTape`. Each rank computes the gradients of
    its share of a batch; `apply` and `apply_gradients` take all ranks, and make the same step on
    all of them. `tnt.Model` and `tnt.PipelineModel` need no such optimizer.

    The mean over ranks is the gradient of the whole batch if all ranks have the same number of
    samples. Otherwise weigh the loss with `samples * tnt.get_size() / samples_of_all_ranks`, or
    divide it by the latter and use `op="sum"`.

    Rows of an embedding stay rows, for optimizers treat them one by one. If all ranks have read the
    same rows, each of them once, these are positions: they add up. If some are there several times
    when a weight is first updated, nothing tells what they are, and that is refused.

    Args:
        optimizer: Any Keras optimizer, built or not. Its options see the averaged gradients:
            clipping and loss scaling are those of the whole batch.
        op: `"mean"` or `"sum"` of the gradients of all ranks.
        fusion_threshold: Bytes up to which gradients are packed into one message, also as in
            `"32MiB"`. Default: what `TNT_FUSION_THRESHOLD` says, or 32 MiB.
        wire_dtype: Dtype in which gradients travel, such as `"bfloat16"`; `None` for their own.
            They are added up in float32 at least.

    Returns:
        The same optimizer; `apply` and `apply_gradients`, also where its class overrides them, get
        what all ranks have made. Still an instance of its class, and saved as such.

    Raises:
        ConfigurationError: Another `op`, or no Keras optimizer. Later, if another optimizer wraps
            it; of `apply`, in a `tf.function` or with other variables on other ranks.

    Example::

        optimizer = tnt.DistributedOptimizer(keras.optimizers.Adam(1e-3))
        optimizer.build(model.trainable_variables)
        tnt.broadcast_variables(model.variables + optimizer.variables)

        @tf.function
        def gradients_of(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_function(y, model(x, training=True)))
            return loss, tape.gradient(loss, model.trainable_variables)

        for x, y in dataset.shard(tnt.get_size(), tnt.get_rank()):
            loss, gradients = gradients_of(x, y)
            optimizer.apply(gradients, model.trainable_variables)
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer is a Keras optimizer. Received: optimizer={optimizer!r}"
        )
    if op not in ("mean", "sum"):
        raise ConfigurationError(f'op is "mean" or "sum". Received: op={op!r}')
    if averages_gradients(optimizer):
        raise ConfigurationError("optimizer is a DistributedOptimizer already.")
    in_buckets([], fusion_threshold)  # refuses a wrong one
    options = {"_op": op, "_threshold": fusion_threshold, "_wire_dtype": wire_dtype}
    optimizer.__class__ = class_before(type(optimizer), _Distributed, **options)
    return optimizer


def averages_gradients(optimizer: Any) -> bool:
    """Whether an optimizer is a `DistributedOptimizer`."""
    return isinstance(optimizer, _Distributed)


class _Distributed:
    """Replaces one rank's gradients by the sums of all ranks."""

    _op: str
    _threshold: int | float | str | None
    _wire_dtype: str | None
    _exchange: GradientExchange | None = None
    _has_averaged = False
    _trainable_variables: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # Keras' wrappers take it away
            raise ConfigurationError(
                "A DistributedOptimizer in another optimizer, such as compile() makes for "
                "mixed_float16, averages too late: only some ranks would skip a step. Wrap the "
                "outer one: tnt.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))."
            )
        super().__setattr__(name, value)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Averages gradients over all ranks and applies them; takes all ranks."""
        if not self._has_averaged:
            known = trainable_variables or self._trainable_variables
            grads = self._averaged(list(grads), list(known))
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """As `apply`, but with pairs. A class may override either, so both get the averages."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        averaged = self._averaged(gradients, variables)
        type(self)._has_averaged = True  # the class is this optimizer's alone
        try:
            return super().apply_gradients(zip(averaged, variables, strict=True))  # type: ignore[misc]
        finally:
            type(self)._has_averaged = False

    def _averaged(
        self, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> Sequence[Gradient]:
        refuse_in_graph("apply() of a DistributedOptimizer")
        ranks = world()
        if ranks.size > 1 and len(variables) == len(gradients):  # else Keras says so
            specs = [f"{variable.dtype}{[*variable.shape]}" for variable in variables]
            with ranks.call("DistributedOptimizer.apply", op=self._op, variables=specs):
                exchange = self._exchange
                if exchange is None or [*map(id, variables)] != [*map(id, exchange.variables)]:
                    exchange = GradientExchange(
                        variables, ranks, self._wire_dtype, self._threshold, guesses=True
                    )
                    type(self)._exchange = exchange
                gradients = exchange.added_up(gradients)
            if self._op == "mean":
                gradients = [scaled(gradient, 1 / ranks.size) for gradient in gradients]
        return gradients


class GradientExchange:
    """Adds up the gradients of some variables over ranks, bucket by bucket."""

    def __init__(
        self,
        variables: Sequence[Any],
        ranks: Communicator,
        wire_dtype: str | None,
        fusion_threshold: int | float | str | None = None,
        guesses: bool = False,
    ) -> None:
        self.variables = list(variables)
        self._buckets = dict(enumerate(in_buckets(self.variables, fusion_threshold)))
        weights = {key: [self.variables[i] for i in own] for key, own in self._buckets.items()}
        self._reduction = GradientReduction(ranks, weights, wire_dtype, guesses=guesses)

    def added_up(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The sums over all ranks."""
        # The last layers come first, as they do from a tape.
        for key, own in self._buckets.items():
            self._reduction.start(key, [gradients[i] for i in own])
        found: dict[int, Gradient] = {}
        for key, own in self._buckets.items():
            found.update(zip(own, self._reduction.finish(key), strict=True))
        return [found[i] for i in range(len(gradients))]
