"""A call with all its sizes known, and the floating point operations of one sample's forward pass.

A multiply-add counts as two.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from tarantella_pp.internals.functional import class_of_keras, tree
from tarantella_pp.partition.graph.layer_graph import Source

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
    """One sample of a tensor that a call reads or makes."""

    id: int  # id of the tensor in the graph
    shape: tuple[int, ...]  # shape of one sample, without the batch, all sizes known
    itemsize: int  # bytes of one element
    has_gradient: bool  # whether the backward pass sends a gradient over it

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
    """A call with the sizes of one sample."""

    operation: Any  # the layer or other Keras operation called
    # Name of the class of Keras whose rules hold for it; empty where there is none: it is not
    # Keras' own, or overrides `call`
    kind: str
    arguments: dict[str, Any]  # its arguments by name, with a `SizedTensor` in place of each tensor
    inputs: tuple[SizedTensor, ...]  # the tensors among them, each once
    outputs: tuple[SizedTensor, ...]  # the tensors it makes
    weights: tuple[tuple[int, ...], ...]  # shapes of its trainable variables

    @property
    def output(self) -> SizedTensor:
        """The first result."""
        return self.outputs[0]


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


#: Layers that multiply by kernels, and apply an activation function to what they make.
KERNELS = (
    *("Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D", "DepthwiseConv1D", "DepthwiseConv2D"),
    *("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"),
    *("SeparableConv1D", "SeparableConv2D"),
)
ATTENTIONS = ("MultiHeadAttention", "GroupedQueryAttention")
#: Layers and operations that move numbers, and neither compute nor keep any.
MOVES = (
    "Reshape Flatten Permute RepeatVector Identity Concatenate ZeroPadding1D ZeroPadding2D"
    " ZeroPadding3D Cropping1D Cropping2D Cropping3D UpSampling1D UpSampling3D"
    " ActivityRegularization GetItem Transpose Squeeze ExpandDims Stack Split Pad Take Cast"
    " StopGradient BroadcastTo Repeat Tile Slice Moveaxis Swapaxes Ravel Roll Flip Copy"
    " ConvertToTensor Unstack"
)
_PER_OUTPUT = by_name(
    {
        0: f"{MOVES} Embedding InputLayer Masking OneHot ZerosLike OnesLike FullLike TakeAlongAxis"
        " Vstack Hstack",
        1: "Add Subtract Multiply Maximum Minimum Negative Where Greater GreaterEqual Less"
        " LessEqual Equal NotEqual LogicalAnd LogicalOr LogicalNot Absolute Abs Square Sign"
        " Floor Ceil Round",
        2: "Clip Rescaling Divide TrueDivide Reciprocal FloorDivide Average PReLU LeakyReLU ELU"
        " Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D",
        4: "BatchNormalization Normalization GaussianNoise GaussianDropout AlphaDropout Exp Log"
        " Log1p Expm1 Sqrt Rsqrt Power Sin Cos",
        5: "RMSNormalization UnitNormalization Normalize",
        6: "Erf Arctan Sinh Cosh Log2 Log10 Mod",
        8: "LayerNormalization GroupNormalization",
    }
)
_PER_INPUT = by_name(
    {
        1: "GlobalMaxPooling GlobalAveragePooling Sum Mean Max Min Amax Amin Prod Any All Argmax"
        " Argmin Cumsum Cumprod",
        4: "Var Std Norm Logsumexp Moments",
    }
)
_ACTIVATIONS = by_name(
    {
        0: "linear",
        1: "relu",
        2: "relu6 leaky_relu hard_tanh",
        3: "hard_sigmoid softsign",
        4: "sigmoid exponential hard_silu",
        5: "elu softmax silu glu",
        6: "selu celu tanh softplus log_softmax log_sigmoid",
        10: "gelu",
        12: "mish",
    }
)


Rule = Callable[[SizedCall], float]


def forward_flops(call: SizedCall) -> tuple[float, Source]:
    """Counts the floating point operations of a call, for one sample."""
    rule = _RULES.get(call.kind)
    if rule is not None:
        return float(rule(call)), "analytic"
    if call.kind in _PER_OUTPUT:
        return float(_PER_OUTPUT[call.kind] * sum(t.size for t in call.outputs)), "analytic"
    if call.kind in ACTIVATION_KINDS:
        return float(_ACTIVATIONS[ACTIVATION_KINDS[call.kind]] * call.output.size), "analytic"
    if call.kind.rstrip("123D") in _PER_INPUT:
        cost = _PER_INPUT[call.kind.rstrip("123D")]
        return float(cost * sum(t.size for t in call.inputs)), "analytic"
    return _guess(call), "estimated"


def _guess(call: SizedCall) -> float:
    """Guesses that matrices are multiplied at each position, as recurrent layers do."""
    weights = getattr(call.operation, "weights", ())
    matrices = sum(math.prod(weight.shape) for weight in weights if len(weight.shape) > 1)
    positions = max((math.prod(t.shape[:-1]) for t in (*call.inputs, *call.outputs)), default=1)
    return float(2 * matrices * positions + sum(t.size for t in call.outputs))


def _activation(layer: Any, size: int) -> float:
    return _ACTIVATIONS.get(activation_name(getattr(layer, "activation", None)), 4) * size


def _with_bias_and_function(call: SizedCall, products: float) -> float:
    """Adds what such layers do to the result of their products of matrices."""
    layer, size = call.operation, call.output.size
    biased = getattr(layer, "use_bias", False) or getattr(layer, "bias", None) is not None
    return products + size * bool(biased) + _activation(layer, size)


def einsum_flops(equation: str, shapes: list[tuple[int, ...]]) -> float:
    """Counts the operations of an einsum of two or more tensors."""
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.split("->")[0].split(","), shapes, strict=True):
        term = term.strip()
        before, _, after = term.partition("...")
        if "..." in term:
            middle = shape[len(before) : len(shape) - len(after)]
            sizes["..."] = max(sizes.get("...", 1), math.prod(middle))
            shape = (*shape[: len(before)], *shape[len(shape) - len(after) :])
        for letter, size in zip(before + after, shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return 2.0 * math.prod(sizes.values())


def _kernels(call: SizedCall) -> float:
    """Each entry of a kernel is multiplied once at each position."""
    layer = call.operation
    if call.kind == "EinsumDense":
        shapes = [(1, *call.inputs[0].shape), tuple(layer.kernel.shape)]
        return _with_bias_and_function(call, einsum_flops(layer.equation, shapes))
    entries = sum(math.prod(weight.shape) for weight in layer.weights if len(weight.shape) > 1)
    # A transposed convolution spreads its inputs.
    tensor = call.inputs[0] if "Transpose" in call.kind else call.output
    return _with_bias_and_function(call, 2 * entries * (tensor.size // _channels(layer, tensor)))


def _einsum(call: SizedCall) -> float:
    operands = call.arguments.get("operands", ())
    shapes = [(1, *o.shape) if isinstance(o, SizedTensor) else tuple(o.shape) for o in operands]
    return einsum_flops(call.operation.subscripts, shapes)


def _matmul(call: SizedCall) -> float:
    return 2.0 * call.output.size * call.inputs[0].shape[-1] if call.inputs[0].shape else 2.0


def _reversible_embedding(call: SizedCall) -> float:
    if not call.arguments.get("reverse"):
        return 0.0
    capped = call.operation.logit_soft_cap is not None
    return _matmul(call) + (_ACTIVATIONS["tanh"] + 2) * call.output.size * capped


def _dot(call: SizedCall) -> float:
    axes = getattr(call.operation, "axes", -1)
    axis = axes if isinstance(axes, int) else axes[0]
    summed = call.inputs[0].shape[axis - 1 if axis > 0 else axis]  # sized tensors have no batch
    return 2.0 * call.output.size * summed


def _channels(layer: Any, tensor: SizedTensor) -> int:
    first = getattr(layer, "data_format", None) == "channels_first"
    return tensor.shape[0 if first else -1]


def attention_sizes(call: SizedCall) -> tuple[int, int, int, int, int]:
    """Returns the sizes of an attention layer: heads, key and value size, queries, keys."""
    layer, query = call.operation, call.arguments["query"]
    value = call.arguments["value"]
    queries = math.prod(query.shape[:-1])
    keys = math.prod(value.shape[:-1])
    if call.kind == "GroupedQueryAttention":
        return layer.num_query_heads, layer.head_dim, layer.head_dim, queries, keys
    return layer.num_heads, layer.key_dim, layer.value_dim, queries, keys


def _attention(call: SizedCall) -> float:
    heads, key_size, value_size, queries, keys = attention_sizes(call)
    layer = call.operation
    shared = getattr(layer, "num_key_value_heads", heads)
    query, value = call.arguments["query"], call.arguments["value"]
    key = call.arguments.get("key") or value
    projections = queries * query.shape[-1] * heads * key_size
    projections += keys * key.shape[-1] * shared * key_size
    projections += keys * value.shape[-1] * shared * value_size
    projections += queries * heads * value_size * call.output.shape[-1]
    products = projections + heads * queries * keys * (key_size + value_size)
    return float(2 * products + _ACTIVATIONS["softmax"] * heads * queries * keys)


def _dot_attention(call: SizedCall) -> float:
    query, value = call.inputs[0], call.inputs[1] if len(call.inputs) > 1 else call.inputs[0]
    scores = math.prod(query.shape[:-1]) * math.prod(value.shape[:-1])
    return 2 * scores * (query.shape[-1] + value.shape[-1]) + 5 * scores


_POOLINGS = [f"{kind}Pooling{n}D" for kind in ("Max", "Average") for n in (1, 2, 3)]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(KERNELS, _kernels),
    "Einsum": _einsum,
    "Matmul": _matmul,
    "Dot": _dot,
    "ReversibleEmbedding": _reversible_embedding,
    **dict.fromkeys(_POOLINGS, lambda c: math.prod(c.operation.pool_size) * c.output.size),
    "UpSampling2D": lambda c: 0 if c.operation.interpolation == "nearest" else 8 * c.output.size,
    **dict.fromkeys(ATTENTIONS, _attention),
    **dict.fromkeys(("Attention", "AdditiveAttention"), _dot_attention),
    "Activation": lambda call: _activation(call.operation, call.output.size),
}
