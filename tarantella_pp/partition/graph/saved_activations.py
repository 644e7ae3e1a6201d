"""What the backward pass of a call needs again, by rules for TensorFlow's gradients.

The rules were read off traced gradient graphs; `tests/partition/plan/test_stage_costs.py` traces
layers and holds the rules to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tarantella_pp.internals.functional import tree
from tarantella_pp.partition.graph.flops import (
    ACTIVATION_KINDS,
    ATTENTIONS,
    KERNELS,
    MOVES,
    SizedCall,
    SizedTensor,
    activation_name,
    attention_sizes,
    by_name,
)
from tarantella_pp.partition.graph.layer_graph import Source


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """What is kept from the forward to the backward pass of one call."""

    tensors: tuple[int, ...] = ()  # ids of the tensors among its inputs and outputs that are kept
    bytes: float = 0.0  # bytes per sample of everything else that is kept
    source: Source = "analytic"  # whether a rule for this layer says so, or a guess


Rule = Callable[[SizedCall], SavedActivations]
#: Kept for the gradient of an activation function: "in" (what it is given), "out" (its result)
#: or neither, and how many more tensors of that size.
_ACTIVATIONS: dict[str, tuple[str, float]] = by_name(
    {
        ("", 0.0): "linear",
        ("out", 0.0): "relu relu6 elu selu tanh sigmoid softmax exponential",
        ("in", 0.0): "leaky_relu softsign",
        ("", 1.0): "softplus hard_sigmoid log_softmax celu",
        ("in", 1.0): "silu",
        ("in", 2.0): "mish hard_silu",
        ("", 3.0): "gelu",
    }
)
#: Operations that keep such a tensor, too.
_LIKE_ACTIVATIONS = {
    **ACTIVATION_KINDS,
    **by_name(
        {
            "exponential": "Exp Sqrt Rsqrt",
            "softplus": "Expm1 Log Log1p Sin Cos Abs Absolute Square Power Erf",
        }
    ),
}
#: Layers that keep nothing.
_NOTHING = set(
    f"{MOVES} Add Subtract Average Negative Rescaling Normalization GaussianNoise Mean Sum Cumsum"
    " AveragePooling1D AveragePooling2D AveragePooling3D GlobalAveragePooling1D"
    " GlobalAveragePooling2D GlobalAveragePooling3D".split()
)
#: Layers that keep their input and this number of tensors of its size.
_NORMALIZATIONS = by_name(
    {
        0: "BatchNormalization GroupNormalization",
        1: "LayerNormalization RMSNormalization UnitNormalization Normalize",
    }
)


def saved_activations(call: SizedCall) -> SavedActivations:
    """Says what a call keeps for its backward pass."""
    if not any(tensor.has_gradient for tensor in call.outputs):
        return SavedActivations()
    rule = _RULES.get(call.kind)
    if rule is not None:
        return rule(call)
    if call.kind in _NOTHING:
        return SavedActivations()
    if call.kind in _LIKE_ACTIVATIONS:
        return _activation(_LIKE_ACTIVATIONS[call.kind], call)
    if call.kind in _NORMALIZATIONS:
        return _normalization(call)
    return _guess(call)


def _ids(tensors: Iterable[SizedTensor]) -> tuple[int, ...]:
    return tuple(tensor.id for tensor in tensors)


def _bytes(size: float) -> SavedActivations:
    """Keeps nothing that travels, and some bytes besides."""
    return SavedActivations((), float(size))


def _guess(call: SizedCall) -> SavedActivations:
    """Guesses: what goes in and out, and one more tensor for each trainable matrix."""
    matrices = sum(len(shape) > 1 for shape in call.weights)
    made = sum(tensor.bytes for tensor in call.outputs)
    return SavedActivations(_ids((*call.inputs, *call.outputs)), matrices * made, "estimated")


def _activation(name: str, call: SizedCall) -> SavedActivations:
    if name not in _ACTIVATIONS:
        return _guess(call)
    what, more = _ACTIVATIONS[name]
    tensors = {"in": call.inputs[:1], "out": call.outputs[:1]}.get(what, ())
    return SavedActivations(_ids(tensors), more * call.output.bytes)


def _kernel(call: SizedCall) -> SavedActivations:
    layer = call.operation
    given = _ids(call.inputs[:1]) if any(len(shape) > 1 for shape in call.weights) else ()
    name = activation_name(layer.activation)
    if name not in _ACTIVATIONS:
        return SavedActivations((*given, call.output.id), 2 * call.output.bytes, "estimated")
    what, more = _ACTIVATIONS[name]
    before = call.output.bytes if what == "in" else 0  # what the activation is given is no tensor
    after = (call.output.id,) if what == "out" else ()
    if call.kind.startswith("Separable"):  # what its first convolution has made
        before += call.output.bytes // layer.filters * layer.pointwise_kernel.shape[-2]
    return SavedActivations((*given, *after), before + more * call.output.bytes)


def _normalization(call: SizedCall) -> SavedActivations:
    if call.kind == "BatchNormalization" and not call.operation.trainable:
        return SavedActivations()
    more = _NORMALIZATIONS[call.kind] * call.inputs[0].bytes
    return SavedActivations(_ids(call.inputs[:1]), more)


def _product(call: SizedCall) -> SavedActivations:
    """Each factor is needed for the gradients of the others; some may be variables."""
    flat = tree.flatten(list(call.arguments.values()))
    factors = [value for value in flat if isinstance(value, SizedTensor)]
    flowing = sum(factor.has_gradient for factor in factors) + len(call.weights)
    return SavedActivations(tuple({f.id: None for f in factors if flowing > f.has_gradient}))


def _quotient(call: SizedCall) -> SavedActivations:
    divisor = call.arguments.get("x2")
    if not isinstance(divisor, SizedTensor):
        return SavedActivations()
    return SavedActivations((divisor.id,), call.output.bytes if divisor.has_gradient else 0.0)


def _reversible_embedding(call: SizedCall) -> SavedActivations:
    layer = call.operation
    if not call.arguments.get("reverse"):
        return _bytes(call.inputs[0].bytes)
    capped = layer.logit_soft_cap is not None
    source: Source = "analytic" if layer.reverse_dtype is None else "estimated"
    return SavedActivations(_ids(call.inputs), call.output.bytes if capped else 0.0, source)


def _attention(call: SizedCall) -> SavedActivations:
    heads, key_size, value_size, queries, keys = attention_sizes(call)
    itemsize = call.output.itemsize
    projected = heads * (queries * key_size + keys * (key_size + value_size))
    attended = heads * queries * value_size
    scores = heads * queries * keys
    dropped = getattr(call.operation, "dropout", 0.0) or getattr(call.operation, "_dropout", 0.0)
    more = itemsize * (projected + attended + scores)
    if dropped:
        more += scores * (itemsize + 1)
    return SavedActivations(_ids(call.inputs[: 3 if call.weights else 0]), float(more))


def _dot_attention(call: SizedCall) -> SavedActivations:
    scores = math.prod(call.inputs[0].shape[:-1]) * math.prod(call.inputs[-1].shape[:-1])
    return SavedActivations(_ids(call.inputs), float(scores * call.output.itemsize))


def _recurrent(call: SizedCall) -> SavedActivations:
    """Each step keeps its input and some vectors of the state's size, in each direction."""
    given, layer = call.inputs[0], call.operation
    twice = call.kind == "Bidirectional"
    layers = [layer.forward_layer, layer.backward_layer] if twice else [layer]
    vectors = [(2 if type(one).__name__ == "SimpleRNN" else 8) * one.units for one in layers]
    states = given.itemsize * given.shape[0] * sum(vectors)
    return SavedActivations((), float(len(layers) * given.bytes + states), "estimated")


_OF_INPUT = ("Max", "Min", "Var", "Std", "Logsumexp", "Embedding")
_RULES: dict[str, Rule] = {
    "Activation": lambda call: _activation(activation_name(call.operation), call),
    # What they are given is kept for the gradient of their kernel.
    **dict.fromkeys(KERNELS, _kernel),
    # Dropout keeps which entries stay, a byte each; noise keeps itself.
    "Dropout": lambda call: _bytes(call.output.size if call.operation.rate else 0),
    **dict.fromkeys(
        [f"SpatialDropout{n}D" for n in (1, 2, 3)],
        lambda call: _bytes(call.output.shape[-1] if call.operation.rate else 0),
    ),
    **dict.fromkeys(
        ("GaussianDropout", "AlphaDropout"),
        lambda call: _bytes(call.output.bytes if call.operation.rate else 0),
    ),
    **dict.fromkeys(
        [f"MaxPooling{n}D" for n in (1, 2, 3)],
        lambda call: SavedActivations(_ids((*call.inputs[:1], *call.outputs))),
    ),
    **dict.fromkeys(
        (*(f"GlobalMaxPooling{n}D" for n in (1, 2, 3)), *_OF_INPUT),
        lambda call: _bytes(call.inputs[0].bytes),
    ),
    **dict.fromkeys(("Multiply", "Matmul", "Einsum", "Dot", "Tensordot"), _product),
    **dict.fromkeys(("Divide", "TrueDivide"), _quotient),
    "Where": lambda call: SavedActivations(
        _ids(t for t in call.inputs if t is call.arguments.get("condition"))
    ),
    **dict.fromkeys(
        ("Maximum", "Minimum"),
        lambda call: _bytes(call.output.size * max(1, len(call.inputs) - 1)),
    ),
    "Clip": lambda call: _bytes(2 * call.output.size),
    "ReversibleEmbedding": _reversible_embedding,
    "UpSampling2D": lambda call: SavedActivations(
        _ids(call.inputs[:1]) if call.operation.interpolation != "nearest" else ()
    ),
    **dict.fromkeys(ATTENTIONS, _attention),
    "Attention": _dot_attention,
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN", "Bidirectional"), _recurrent),
}
