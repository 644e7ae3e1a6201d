"""A call with all its sizes known: what the cost rules look at."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from tarantella_pp.internals.functional import class_of_keras, tree

Value = TypeVar("Value")


def by_name(groups: Mapping[Value, str]) -> dict[str, Value]:
    """Turns a value with the names it holds for into the value of each name."""
    return {name: value for value, names in groups.items() for name in names.split()}


#: Layers and operations that are an activation function, by its name.
ACTIVATION_KINDS = by_name(
    {
        "relu": "ReLU Relu",
        "leaky_relu": "LeakyReLU LeakyRelu",
        "elu": "ELU Elu",
        "softmax": "Softmax",
        **{n.lower(): n for n in ("Relu6", "Sigmoid", "Tanh", "Softplus", "Softsign", "Selu")},
        **{n.lower(): n for n in ("Silu", "Gelu", "Celu", "Glu")},
        "log_softmax": "LogSoftmax",
        "log_sigmoid": "LogSigmoid",
        "hard_sigmoid": "HardSigmoid",
        "hard_silu": "HardSilu",
        "hard_tanh": "HardTanh",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class SizedTensor:
    """One sample of a tensor that a call reads or makes.

    Attributes:
        id: Id of the tensor in the graph.
        shape: Shape of one sample, without the batch, all sizes known.
        itemsize: Bytes of one element.
        has_gradient: Whether the backward pass sends a gradient over it.
    """

    id: int
    shape: tuple[int, ...]
    itemsize: int
    has_gradient: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class SizedCall:
    """A call with the sizes of one sample.

    Attributes:
        operation: The layer or other Keras operation called.
        kind: Name of the class of Keras whose rules hold for it; empty where there is none: it
            is not Keras' own, or overrides `call`.
        arguments: Its arguments by name, with a `SizedTensor` in place of each tensor.
        inputs: The tensors among them, each once.
        outputs: The tensors it makes.
        weights: Shapes of its trainable variables.
    """

    operation: Any
    kind: str
    arguments: dict[str, Any]
    inputs: tuple[SizedTensor, ...]
    outputs: tuple[SizedTensor, ...]
    weights: tuple[tuple[int, ...], ...]

    @property
    def output(self) -> SizedTensor:
        """The first result."""
        return self.outputs[0]

    def inner(self, operation: Any, given: SizedTensor, made: SizedTensor) -> SizedCall:
        """Returns the call of a layer inside this one."""
        shapes = tuple(tuple(variable.shape) for variable in operation.trainable_variables)
        kind = class_of_keras(operation)
        return SizedCall(operation, kind, {"inputs": given}, (given,), (made,), shapes)


def sized_call(
    operation: Any,
    arguments: Any,
    tensors: dict[int, SizedTensor],
    outputs: tuple[SizedTensor, ...],
    weights: tuple[tuple[int, ...], ...],
) -> SizedCall:
    """Binds a call's arguments to their names and sizes."""
    args, kwargs = arguments.fill_in(tensors)
    parameters = inspect.signature(operation.call).parameters
    known = {name: value for name, value in kwargs.items() if name in parameters}
    try:
        named = dict(inspect.signature(operation.call).bind_partial(*args, **known).arguments)
    except TypeError:
        named = {}
    given = [value for value in tree.flatten((args, kwargs)) if isinstance(value, SizedTensor)]
    return SizedCall(
        operation=operation,
        kind=class_of_keras(operation),
        arguments=named,
        inputs=tuple({tensor.id: tensor for tensor in given}.values()),
        outputs=outputs,
        weights=weights,
    )


def activation_name(activation: Any) -> str:
    """Returns the name of an activation function; empty where it is not one of Keras' own."""
    if activation is None:
        return "linear"
    if isinstance(activation, keras.layers.Activation):
        activation = activation.activation
    name = getattr(activation, "__name__", type(activation).__name__)
    return name if getattr(keras.activations, name, None) is activation else ""
