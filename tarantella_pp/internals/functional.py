"""The private names of Keras that reading a model needs."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras import tree as tree
from keras.src import backend
from keras.src.backend import compute_output_spec as compute_output_spec
from keras.src.models.functional import Functional as Functional
from keras.src.models.functional import operation_fn as operation_fn
from keras.src.ops.function import Function as Function

# The mask attached to a tensor, symbolic or not; `None` for none.
get_mask, set_mask = backend.get_keras_mask, backend.set_keras_mask
# A graph of TensorFlow, like a function's, to trace in; it has a name.
new_graph = tf.__internal__.FuncGraph


def network_of(model: Any) -> Any:
    """Returns the Functional that holds a model's operations; `None` where there is none."""
    if isinstance(model, Functional):
        return model
    if isinstance(model, keras.Sequential):
        return model._functional
    return None


def network_around(model: Any) -> Any:
    """Returns a graph with nothing but the call of a model on inputs; `None` if there was none."""
    for node in reversed(model._inbound_nodes):
        args, kwargs = node.arguments.args, node.arguments.kwargs
        others = {name for name, value in kwargs.items() if value is not None} - {"training"}
        if len(args) == 1 and not others and all(map(_is_input, tree.flatten(args[0]))):
            outputs = compute_output_spec(model, args[0])
            return Function(args[0], tree.pack_sequence_as(outputs, node.outputs))
    return None


def takes_training(layer: Any) -> bool:
    """Whether the `call` of a layer has an argument `training`; else `fit` gives it none."""
    return bool(layer._call_has_training_arg)


def treat_like(whole: Any, model: Any) -> None:
    """Has `fit` tell a model as little of training, and name its losses, as that in it."""
    whole._call_has_training_arg = model._call_has_training_arg
    whole.output_names = getattr(model, "output_names", None)


def _is_input(tensor: Any) -> bool:
    kind = keras.layers.InputLayer
    return isinstance(tensor, keras.KerasTensor) and isinstance(input_layer_of(tensor), kind)


def runs_its_graph(model: Any) -> bool:
    """Returns whether calling the model runs its graph of operations and does nothing else."""
    kind = type(model)
    base = Functional if isinstance(model, Functional) else keras.Sequential
    return kind.call is base.call and _hands_calls_on(model)


def _hands_calls_on(model: Any) -> bool:
    """Whether a `__call__` of the model's class, if there is one, only looks at what it gets."""
    kind, network = type(model), network_of(model)
    if kind.__call__ is keras.layers.Layer.__call__:
        return True
    if network is None:
        return False
    inputs, outputs = inputs_struct(network), outputs_struct(network)
    handed: list[tuple[Any, ...]] = []

    def behind(layer: Any, *args: Any, **kwargs: Any) -> Any:
        given = args or (kwargs.pop("inputs", None),)
        handed.append((layer, *given, *kwargs.items()))
        return outputs

    # The one behind it must get all as it is given, and what that returns must come back as it is.
    with mock.patch.object(keras.layers.Layer, "__call__", behind):
        try:
            returned = model(inputs, training=True)
        except Exception:  # of code that needs values
            return False
    if len(handed) != 1 or len(handed[0]) != 3 or handed[0][2] != ("training", True):
        return False
    layer, given, _ = handed[0]
    return layer is model and _are_same(given, inputs) and _are_same(returned, outputs)


def _are_same(value: Any, other: Any) -> bool:
    """Whether two structures are alike and have the very same tensors."""
    pairs = zip(tree.flatten(value), tree.flatten(other), strict=False)
    alike = type(value) is type(other) and len(tree.flatten(value)) == len(tree.flatten(other))
    return alike and all(one is another for one, another in pairs)


def build_late(model: Any, inputs: Any) -> None:
    """Has layers make what they make when they first run, as activations with weights do."""
    for training in (False, True):  # as `fit` of Keras does, and its first step
        if not all(layer.built for layer in sublayers(model)):
            compute_output_spec(model, inputs, training=training)


def hides_its_graph(model: Any) -> bool:
    """Says whether a model's operations cannot be seen: subclassed, or a Sequential not built."""
    is_model = isinstance(model, keras.Model)
    return is_model and not (network_of(model) is not None and runs_its_graph(model))


def adopt_layers(model: Any, other: Any) -> None:
    """Has a model count its layers and their weights as another one does, and log its metrics."""
    if isinstance(other, Functional):
        object.__setattr__(model, "_layers", list(other._layers))
    model._metrics.extend(own_metrics(other))


def is_plain_call(model: Any) -> bool:
    """Returns whether a nested model adds nothing of its own to the operations in it."""
    return bool(
        runs_its_graph(model)
        and model.activity_regularizer is None
        and not model.supports_masking
        and model._remat_mode is None
        and model.quantization_mode is None
        and set(model._call_context_args) == {"training"}
    )


def inputs_struct(network: Any) -> Any:
    """The inputs of a Functional in the structure in which it is called."""
    return network._inputs_struct


def outputs_struct(network: Any) -> Any:
    """The outputs of a Functional in the structure in which it returns them."""
    return network._outputs_struct


def input_layer_of(tensor: Any) -> Any:
    """The layer that a symbolic input of a model comes from."""
    return tensor._keras_history.operation


def ordered_nodes(network: Any) -> list[Any]:
    """Returns the calls in a Functional in the order in which Keras runs them."""
    by_depth = network._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def sublayers(operation: Any) -> list[Any]:
    """Returns a layer and all layers in it; nothing for an operation that is no layer."""
    if isinstance(operation, keras.layers.Layer):
        return list(operation._flatten_layers())
    if isinstance(operation, Function):
        return [layer for inner in operation.operations for layer in sublayers(inner)]
    return []


def stateful_layers(model: Any) -> list[str]:
    """Names recurrent layers that go on in a batch where the one before has ended."""
    layers = (part for part in sublayers(model) if isinstance(part, keras.layers.RNN))
    return [layer.name for layer in layers if layer.stateful]


def layer_metrics(operation: Any) -> list[Any]:
    """Returns the metrics that a call may update: of a layer and all layers in it."""
    layers = sublayers(operation)
    own = (own_metrics(x) if isinstance(x, keras.Model) else x.metrics for x in layers)
    return list(dict.fromkeys(metric for metrics in own for metric in metrics))


def own_metrics(model: Any) -> list[Any]:
    """Returns the metrics that a model has as attributes, which Keras logs and resets."""
    return list(model._metrics)


def states_of(operation: Any, arguments: Any = None) -> list[Any]:
    """Returns the variables that one call uses: seeds of random layers included, and metrics."""
    owners = [operation] if isinstance(operation, keras.layers.Layer) else sublayers(operation)
    variables = [variable for owner in owners for variable in owner.variables]
    variables += [v for metric in layer_metrics(operation) for v in metric.variables]
    variables += [] if arguments is None else _variables_in(arguments)
    return list({id(variable): variable for variable in variables}.values())


def likeness_of(operation: Any, arguments: Any) -> str | None:
    """What calls have in common that compute alike; `None` where the configuration says nothing."""
    try:
        config = dict(keras.saving.serialize_keras_object(operation))
        config["config"] = {**config["config"], "name": None}
        text = json.dumps(config, sort_keys=True)
    except (TypeError, ValueError, NotImplementedError):
        return None
    if '"class_name": "function"' in text:  # only its name
        return None
    given = tree.map_structure(
        lambda x: str(x.shape) if isinstance(x, keras.KerasTensor) else repr(x),
        (arguments.args, arguments.kwargs),
    )
    return f"{text} {given} {[v.trainable for v in states_of(operation, arguments)]}"


def trained_variables(operation: Any) -> list[Any]:
    """Returns the variables of a call that only optimizers change, whether frozen now or not."""
    return [v for layer in sublayers(operation) for v in layer._trainable_variables]


def reads_variables(network: Any) -> bool:
    """Whether an operation in a Functional that is no layer takes a variable as argument."""
    # Such a read depends on the dtype scope that the model around it opens.
    return any(
        _variables_in(node.arguments)
        for node in ordered_nodes(network)
        if not isinstance(node.operation, keras.layers.Layer)
    )


def _variables_in(arguments: Any) -> list[Any]:
    given = tree.flatten((arguments.args, arguments.kwargs))
    return [value for value in given if isinstance(value, keras.Variable)]


def is_default(method: Any) -> bool:
    """Returns whether a method of a layer is the one that `keras.Layer` comes with."""
    return bool(getattr(method, "_is_default", False))


def is_own_layer(operation: Any) -> bool:
    """Whether a layer is one of Keras' own whose way with masks is all in `compute_mask`."""
    others = (keras.layers.Lambda, keras.layers.Pipeline, keras.layers.ReversibleEmbedding)
    kind = type(operation)
    return kind.__module__.startswith("keras.src.layers.") and kind not in others


def class_of_keras(operation: Any) -> str:
    """Returns the name of the class of Keras that defines what an operation computes."""
    kind: Any = type(operation)
    for base in kind.__mro__:
        if base.__module__.startswith(("keras.src.layers.", "keras.src.ops.")):
            return str(base.__name__) if kind.call is base.call else ""
    return ""


def repeats_itself(layer: Any) -> bool:
    """Whether the backward pass calls a layer anew (`keras.RematScope`)."""
    return layer._remat_mode is not None


@contextlib.contextmanager
def functions_inside(are_inlined: bool) -> Iterator[None]:
    """Has each `tf.function` run as its code, for it would keep placeholders for later calls."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(are_inlined)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def layer_calls(handler: Callable[..., Any]) -> Iterator[None]:
    """Hands the calls of layers, and how Keras makes them, to a handler, in the default graph."""
    original, graph = keras.layers.Layer.__call__, tf.compat.v1.get_default_graph()

    @functools.wraps(original)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # Inside of loops and branches the same code runs in other graphs.
        if tf.compat.v1.get_default_graph() is not graph:
            return original(layer, *args, **kwargs)
        return handler(original, layer, args, kwargs)

    with mock.patch.object(keras.layers.Layer, "__call__", call):
        yield


class GlueScope(keras.StatelessScope):  # type: ignore[misc]
    """Between the calls of layers: `read` gives values of variables, `None` for the true one.

    Nothing is written, so that another call of a layer reads what it read before, and losses that
    are added come to `add`.
    """

    def __init__(
        self, read: Callable[[Any], Any], write: Callable[[Any], None], add: Callable[[Any], None]
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._read, self._write, self._add = read, write, add

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable."""
        return self._read(variable)

    def add_update(self, update: Any) -> None:
        """Takes note that a variable would change."""
        self._write(update[0])

    def add_loss(self, loss: Any) -> None:
        """Takes note of a loss that a layer adds."""
        self._add(loss)
        super().add_loss(loss)
