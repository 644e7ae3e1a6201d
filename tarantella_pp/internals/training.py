"""The private names of Keras and TensorFlow that training needs, but for data."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.losses.loss import reduce_weighted_values
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import CompileLoss as CompileLoss
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util

from tarantella_pp.internals.functional import sublayers

# Layers that a warning names; models have hundreds of one kind.
_NAMED = 3


def added_losses(layer: Any) -> list[tuple[str, Any]]:
    """Losses that a layer and those in it added in their last call, regularizers of weights not."""
    return [(part.name, loss) for part in sublayers(layer) for loss in part._get_own_losses()]


def build_metrics(model: Any, y: Any, y_pred: Any, sample_weight: Any) -> tuple[int | None, ...]:
    """Creates the variables of a compiled model's loss trackers and metrics, without data."""
    loss: Any = None
    if model._compile_loss is not None:
        loss = backend.compute_output_spec(model._compile_loss, y, y_pred, sample_weight)
    if model._compile_metrics is not None and not model._compile_metrics.built:
        model._compile_metrics.build(y, y_pred)
        # Some metrics make their variables in their first update.
        backend.compute_output_spec(model._compile_metrics.update_state, y, y_pred, sample_weight)
    return () if loss is None else tuple(loss.shape)


def compiled_loss(model: Any) -> Any:
    """The `CompileLoss` of a compiled model; `None` without a loss."""
    return model._compile_loss


def losses_of_outputs(loss: Any) -> list[Any]:
    """The losses that a `CompileLoss` has found for outputs when it was built."""
    return [entry.loss for entry in loss._flat_losses]


def compiled_metrics(model: Any) -> Any:
    """The `CompileMetrics` of a compiled model; `None` without metrics."""
    return model._compile_metrics


def made_by_keras(part: Any) -> bool:
    """Whether a part of a model is one of Keras' own, and so are the functions it was given."""
    functions = filter(inspect.isfunction, vars(part).values())
    given = (getattr(part, name, type(part)) for name in ("fn", "_fn"))
    made = (type(part), *given, *functions)
    return all(str(getattr(each, "__module__", "")).startswith("keras.") for each in made)


def track_loss(model: Any, loss: Any, rows: Any) -> None:
    """Updates the mean of the loss that a model's logs tell."""
    model._loss_tracker.update_state(loss, sample_weight=rows)


def compile_loss(model: Any, loss: Any, loss_weights: Any) -> Any:
    """The loss that a model would be compiled with; `None` for none."""
    if loss is None:
        return None
    return CompileLoss(loss, loss_weights, output_names=model.output_names)


class SecondLoss(CompileLoss):
    """A compiled loss once more: it finds targets, weights and outputs in the same way.

    It has no trackers of the losses of single outputs.
    """

    def __init__(self, first: Any, instead: Callable[..., Any] | None = None) -> None:
        super().__init__(
            first._user_loss, first._user_loss_weights, output_names=first.output_names
        )
        self._flat_losses: Any = None
        self._first, self._instead = first, instead

    def build(self, y_true: Any, y_pred: Any) -> None:
        """Finds the losses of the outputs, as Keras does, and puts others in their places."""
        if self._first.built:  # Keras would make trackers: a function with these is traced twice
            found = ("_flat_losses", "_y_pred_build_structure", "_y_true_build_structure", "built")
            for name in found:
                setattr(self, name, getattr(self._first, name))
        else:
            super().build(y_true, y_pred)
        if self._instead is not None:
            self._flat_losses = [
                entry._replace(loss=functools.partial(self._instead, entry.loss))
                for entry in self._flat_losses
            ]

    @property
    def metrics(self) -> list[None]:
        """No tracker for each of the losses."""
        return [None] * len(self._flat_losses or ())


def sample_values(loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """The values of a loss for each sample before they are reduced, and their mask, if any."""
    convert = functools.partial(keras.ops.convert_to_tensor, dtype=loss.dtype)
    y_pred, y_true = (keras.tree.map_structure(convert, value) for value in (y_pred, y_true))
    values = loss.call(y_true, y_pred)
    return convert(values), backend.get_keras_mask(values)


def reduction_of(loss: Any, values: Any, sample_weight: Any, mask: Any) -> Any:
    """What a loss makes of its values: linear in them."""
    return reduce_weighted_values(
        values, sample_weight=sample_weight, mask=mask, reduction=loss.reduction, dtype=loss.dtype
    )


def reduces_values(loss: Any) -> bool:
    """Whether a loss has values, which Keras reduces, instead of a way of its own to be called."""
    return type(loss).__call__ is keras.losses.Loss.__call__


def logits_of(tensor: Any) -> Any:
    """What softmax or sigmoid of Keras made a tensor of, where it still knows; or `None`."""
    return getattr(tensor, "_keras_logits", None)


def running_states(layer: Any) -> list[Any]:
    """What forward passes of a layer may write: seeds, statistics of batches, metrics."""
    states: list[Any] = []
    for part in sublayers(layer):
        states += [generator.state for generator in part._seed_generators]
        states += [variable for metric in part._metrics for variable in metric.variables]
        if isinstance(part, keras.layers.BatchNormalization):
            states += part.non_trainable_variables
    return states


def global_seed() -> Any:
    """The state of the generator of random numbers without a seed; `None` as long as none were."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


def batch_norms(layer: Any) -> list[Any]:
    """The batch normalizations in a layer."""
    return [p for p in sublayers(layer) if isinstance(p, keras.layers.BatchNormalization)]


def warn_of_statistics(norms: Sequence[Any], parts: str) -> None:
    """Warns of batch normalizations that see parts of batches."""
    if names := ", ".join(layer.name for layer in norms[:_NAMED]):
        more = f", and {len(norms) - _NAMED} more" if len(norms) > _NAMED else ""
        warnings.warn(
            f"BatchNormalization layers {names}{more} take their statistics of each of the "
            f"{parts} instead of the batch, so the numbers differ from those of one process; only "
            "their moving averages see the batch. LayerNormalization and GroupNormalization do not "
            "depend on the batch.",
            UserWarning,
            stacklevel=5,  # behind `surrounded`
        )


@contextlib.contextmanager
def _moments(norms: Iterable[Any], instead: Callable[[Any, Any, Any, Any], Any]) -> Iterator[None]:
    """Has `instead` say what batch normalizations find, of what they would find themselves."""

    def moments(part: Any, inputs: Any, mask: Any) -> Any:
        return instead(part, inputs, mask, type(part)._moments(part, inputs, mask))

    changed = list(norms)
    try:
        for part in changed:
            vars(part)["_moments"] = functools.partial(moments, part)
        yield
    finally:
        for part in changed:
            del vars(part)["_moments"]


@contextlib.contextmanager
def reported_moments(layer: Any, report: Callable[..., bool]) -> Iterator[None]:
    """Tells what batch normalizations find in training."""
    momenta = {part: part.momentum for part in batch_norms(layer) if not part.renorm}

    def told(part: Any, inputs: Any, mask: Any, found: Any) -> Any:
        mean, variance = found
        if mask is None:
            sizes = tf.gather(tf.shape(inputs), part._reduction_axes)
            count = tf.cast(tf.reduce_prod(sizes), mean.dtype)
        else:
            count = tf.reduce_sum(tf.cast(mask, mean.dtype))
        done = report(part, count, tf.reshape(mean, [-1]), tf.reshape(variance, [-1]))
        # A momentum of 1 leaves the moving averages to the one who took the moments.
        part.momentum = 1.0 if done else momenta[part]
        return found

    try:
        with _moments(momenta, told):
            yield
    finally:
        for part, momentum in momenta.items():
            part.momentum = momentum


@contextlib.contextmanager
def moments_known(layer: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Has batch normalizations take their moving averages for what they find in training.

    It gives the list of these, each with the tensor that is taken.
    """
    taken: list[tuple[Any, Any]] = []

    def known(part: Any, inputs: Any, mask: Any, found: Any) -> Any:
        averages = part.moving_mean, part.moving_variance
        pairs = zip(averages, found, strict=True)
        moments = [tf.reshape(tf.cast(a.value, f.dtype), tf.shape(f)) for a, f in pairs]
        taken.extend(zip(averages, moments, strict=True))
        return moments

    with _moments(batch_norms(layer), known):
        yield taken


@contextlib.contextmanager
def gradients_asked() -> Iterator[list[tuple[str, list[Any], list[Any]]]]:
    """Notes in which scopes `tf.gradients` is called, of what and by what."""
    asked, helper = [], gradients_util._GradientsHelper

    def noted(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [[t for t in keras.tree.flatten(x) if isinstance(t, tf.Tensor)] for x in (ys, xs)]
        asked.append((tf.compat.v1.get_default_graph().get_name_scope(), *tensors))
        return helper(ys, xs, *args, **kwargs)

    with mock.patch.object(gradients_util, "_GradientsHelper", noted):
        yield asked


def standardize_inputs(model: Any, x: Any) -> list[Any]:
    """Makes the flat list of a Functional model's inputs, as it does when it is called."""
    model._assert_input_compatibility(x)
    return list(model._standardize_inputs(x))


def strategy_of(model: Any) -> Any:
    """The strategy of `tf.distribute` that a model was made in, or that is in force now, if any."""
    now = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    return model._distribute_strategy or now


@contextlib.contextmanager
def updates_taken(take: Callable[[Any, Any, Any, str], None]) -> Iterator[None]:
    """Hands over what optimizers are asked to apply, and by which method; they do not apply it."""

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        take(optimizer, grads, trainable_variables, "apply")

    def apply_gradients(optimizer: Any, grads_and_vars: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        take(optimizer, gradients, variables, "apply_gradients")
        return optimizer._iterations

    kinds: list[type] = [BaseOptimizer]
    for kind in kinds:  # and for those that come behind it
        kinds += kind.__subclasses__()
    every = {base for kind in kinds for base in kind.__mro__}
    with contextlib.ExitStack() as stack:
        for kind in every:  # mixins, too
            for method in (apply, apply_gradients):
                # Keras' own `apply_gradients` calls `apply`.
                if method.__name__ in vars(kind) and (method is apply or kind is not BaseOptimizer):
                    stack.enter_context(mock.patch.object(kind, method.__name__, method))
        yield


def variables_for(optimizer: Any, trainable_variables: Any) -> list[Any]:
    """The variables of gradients that an optimizer is given; it is built for them if it is not."""
    if trainable_variables is None:
        return list(optimizer._trainable_variables)
    variables = list(trainable_variables)
    if not optimizer.built:
        optimizer.build(variables)
        optimizer.built = True
    return variables


def register_function(definition: Any) -> None:
    """Lets imported graphs call a function; TensorFlow crashes where it does not know one."""
    context.context().add_function_def(definition)


def written_by(operation: Any) -> list[Any]:
    """The variables that an operation may write; loops and branches say which they only read."""
    given = {i: one for i, one in enumerate(operation.inputs) if one.dtype == tf.resource}
    # Few have any, and to look at the attributes of all takes long.
    unchanged = operation.node_def.attr["_read_only_resource_inputs"].list.i if given else ()
    return [tensor for i, tensor in given.items() if i not in unchanged]


def body_of(operation: Any) -> Any:
    """The graph of the function that an operation calls; `None` for any other operation."""
    calls = operation.type in ("PartitionedCall", "StatefulPartitionedCall")
    return _graph_of(operation, "f") if calls else None


def step_of(operation: Any) -> Any:
    """The graph of a step of a loop; `None` for any other operation."""
    return _graph_of(operation, "body") if operation.type in ("While", "StatelessWhile") else None


def _graph_of(operation: Any, attribute: str) -> Any:
    # Old functions, as in TensorFlow's CTC loss, have none.
    function = operation.graph._get_function(operation.get_attr(attribute).name)
    return getattr(function, "graph", None)


def without_graph(function: Any) -> Any:
    """A compiled function as TensorFlow runs it: Python's graphs go, which it makes if asked."""
    for op in function.graph.get_operations():
        # TensorFlow keeps for ever what a gradient of one's own needs, and the graph with it.
        if op.type == "IdentityN":
            ops.gradient_registry._registry.pop(op.get_attr("_gradient_op_type").decode(), None)
    run = function.inference_fn
    todo = [run]
    while todo:
        todo[-1]._cached_graph = None
        todo += getattr(todo.pop(), "children", ())
    return run


class Gpu(NamedTuple):
    """A GPU that this process computes with."""

    name: str  # no other GPU of the host has it
    nbytes: int  # of its memory, that TensorFlow may take


def gpu_in_use() -> Gpu | None:
    """The GPU of this process, if it has one; TensorFlow begins to use it if it has not yet."""
    if not tf.config.get_visible_devices("GPU"):
        return None
    tf.config.list_logical_devices("GPU")  # with the memory growth that was set
    found = (device for device in device_lib.list_local_devices() if device.device_type == "GPU")
    first = next(found)
    return Gpu(first.physical_device_desc, int(first.memory_limit))
