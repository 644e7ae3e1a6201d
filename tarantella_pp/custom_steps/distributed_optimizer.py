"""Optimizers that average the gradients of all ranks, for training loops of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.custom_steps.tensor_collectives import refuse_in_graph
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.options import fusion_threshold_of
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.weights.gradient_reduction import (
    Gradient,
    GradientReduction,
    in_buckets,
)


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

    Args:
        optimizer: Any Keras optimizer, built or not. Its options see the averaged gradients:
            clipping and loss scaling are those of the whole batch.
        op: `"mean"` or `"sum"` of the gradients of all ranks.
        fusion_threshold: Bytes up to which gradients are packed into one message, also as in
            `"32MiB"`. Default: what `TNT_FUSION_THRESHOLD` says, or 32 MiB.
        wire_dtype: Dtype in which gradients travel, such as `"bfloat16"`; `None` for their own.
            They are added up in float32 at least.

    Returns:
        The same optimizer, with another `apply`. Still an instance of its class, and saved as such.

    Raises:
        ConfigurationError: Another `op`, or no Keras optimizer. Later, of `apply`: within a
            `tf.function`, or if not all ranks call it with the same variables.

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
    own = type(optimizer)
    exchange = _GradientExchange(op, fusion_threshold_of(fusion_threshold), wire_dtype)
    # Under its own name and module, so that Keras writes and finds it as what it was.
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    optimizer.__class__ = type(
        own.__name__, (_Distributed, own), {**names, "_gradient_exchange": exchange}
    )
    return optimizer


def averages_gradients(optimizer: Any) -> bool:
    """Whether an optimizer is a `DistributedOptimizer`."""
    return isinstance(optimizer, _Distributed)


class _Distributed:
    """Replaces one rank's gradients by the sums of all ranks."""

    _gradient_exchange: _GradientExchange
    _trainable_variables: Any

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Averages gradients over all ranks and applies them; takes all ranks."""
        refuse_in_graph("apply() of a DistributedOptimizer")
        gradients: Sequence[Gradient] = list(grads)
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(known)
        if len(variables) == len(gradients):  # else Keras says so
            gradients = self._gradient_exchange.combined(gradients, variables)
        super().apply(gradients, trainable_variables)  # type: ignore[misc]


class _GradientExchange:
    """Combines gradients over all ranks of the job."""

    def __init__(self, op: str, fusion_threshold: int, wire_dtype: str | None) -> None:
        self._op = op
        self._threshold = fusion_threshold
        self._wire_dtype = wire_dtype
        self._variables: list[Any] = []
        self._buckets: dict[int, list[int]] = {}
        self._reduction: GradientReduction

    def combined(
        self, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> Sequence[Gradient]:
        """Returns the gradients of all ranks, combined; takes all ranks."""
        ranks = world()
        if ranks.size == 1:
            return gradients
        specs = [f"{variable.dtype}{[*variable.shape]}" for variable in variables]
        with ranks.call("DistributedOptimizer.apply", op=self._op, variables=specs):
            self._prepare(variables, ranks)
            # Those of the last layers come first, as they do from a tape.
            for key, own in self._buckets.items():
                self._reduction.start(key, [gradients[i] for i in own])
            found: dict[int, Gradient] = {}
            for key, own in self._buckets.items():
                found.update(zip(own, self._reduction.finish(key), strict=True))
        scale = 1 / ranks.size if self._op == "mean" else None
        return [_scaled(found[i], scale) for i in range(len(variables))]

    def _prepare(self, variables: Sequence[Any], ranks: Communicator) -> None:
        """Makes the buckets, unless these variables have them already."""
        if [*map(id, variables)] == [*map(id, self._variables)]:
            return
        buckets = in_buckets(variables, self._threshold)
        self._buckets = dict(enumerate(buckets))
        weights = {key: [variables[i] for i in own] for key, own in self._buckets.items()}
        self._reduction = GradientReduction(ranks, weights, self._wire_dtype)
        self._variables = list(variables)


def _scaled(gradient: Gradient, scale: float | None) -> Gradient:
    if gradient is None or scale is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale
