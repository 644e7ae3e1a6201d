"""A traced graph as it is tried out: in wider numbers than its own, on copies of variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from tarantella_pp.internals.training import register_function
from tarantella_pp.runtime.stage.graph_functions import SubgraphExtractor
from tarantella_pp.runtime.stage.side_effects import effects_of

DRAWS = re.compile(
    r"(Stateless|Stateful)?(Random(Uniform|Normal|StandardNormal|Gamma|Poisson|Binomial)"
    r"|StandardNormal|Uniform|(Parameterized)?TruncatedNormal|Multinomial)(Int|Full|Int64)*(V\d)?$"
)
_TAKES_SHAPE = re.compile(r"(Stateless)?(Random|Truncated)")
# The dtypes in which others are tried. Weights are float32 where numbers are half as long, so that
# they need no copies in float32.
FLOAT32 = dict.fromkeys((types_pb2.DT_HALF, types_pb2.DT_BFLOAT16), types_pb2.DT_FLOAT)
FLOAT64 = {
    **dict.fromkeys((*FLOAT32, types_pb2.DT_FLOAT), types_pb2.DT_DOUBLE),
    types_pb2.DT_COMPLEX64: types_pb2.DT_COMPLEX128,
}
# What loops and branches draw, which cannot be given to them: kept by dropout of any rate.
_DRAWN_INSIDE = 0.9999


class TrialGraph(SubgraphExtractor):
    """Makes parts of a traced graph that change nothing that there is.

    Variables are copies where they are written, or are tried in another dtype. In float64 small
    differences stand out from rounding. Loops and branches draw the same number each time.
    """

    def __init__(
        self, function: Any, written: Iterable[tf.Variable], wider: Mapping[int, int]
    ) -> None:
        super().__init__(function)
        self._wider = wider
        copied = list(written)
        # Loops and branches write what they write whenever they run.
        changed = {f"{effect.argument}:0" for effect in effects_of(self._definition)}
        handles = {id(value) for name, value in self._captures.items() if name in changed}
        other = [
            variable
            for variable in function.graph.variables
            if self.dtype(variable.dtype) != variable.dtype or id(variable.handle) in handles
        ]
        variables = {id(variable.handle): variable for variable in (*copied, *other)}
        copies = {}
        for key, variable in variables.items():
            with tf.device(variable.device):
                copies[key] = tf.Variable(self.taken(variable.read_value()), trainable=False)
        self.written = [copies[id(variable.handle)] for variable in copied]
        self._captures = {
            name: copies[id(value)].handle if id(value) in copies else self.taken(value)
            for name, value in self._captures.items()
        }
        self._rewrite()

    def dtype(self, dtype: tf.DType) -> tf.DType:
        """The dtype in which what has another one in the traced graph is tried."""
        return tf.as_dtype(self._wider.get(dtype.as_datatype_enum, dtype))

    def taken(self, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor as it is given to this graph."""
        wanted = self.dtype(tensor.dtype)
        return tensor if tensor.dtype == wanted else tf.cast(tensor, wanted)

    def _rewrite(self) -> None:
        library = self._definition.library.function
        # Others of the same names are known to TensorFlow.
        names = (body.signature.name for body in library)
        renamed = {name: f"{name}_tried_{len(self._wider)}" for name in names}
        for body in library:
            for node in list(body.node_def):
                if DRAWS.match(node.op) and _TAKES_SHAPE.match(node.op):
                    _fix(node, body.node_def.add())
        for nodes in (self._definition.node, *(body.node_def for body in library)):
            for node in nodes:
                node.ClearField("experimental_type")
                node.op = renamed.get(node.op, node.op)
                for value in node.attr.values():
                    self._change(value, renamed)
        for body in library:
            body.signature.name = renamed[body.signature.name]
            for argument in (*body.signature.input_arg, *body.signature.output_arg):
                argument.ClearField("experimental_full_type")
                argument.type = self._wider.get(argument.type, argument.type)
            for value in body.attr.values():
                self._change(value, renamed)
            register_function(body)
        del self._definition.library.gradient[:]

    def _change(self, value: Any, renamed: Mapping[str, str]) -> None:
        """Changes an attribute of an operation: dtypes, constants and names of functions."""
        for function in (*([value.func] if value.HasField("func") else []), *value.list.func):
            function.name = renamed.get(function.name, function.name)
            for inner in function.attr.values():
                self._change(inner, renamed)
        if value.HasField("type"):
            value.type = self._wider.get(value.type, value.type)
        for i, dtype in enumerate(value.list.type):
            value.list.type[i] = self._wider.get(dtype, dtype)
        if value.HasField("tensor") and value.tensor.dtype in self._wider:
            wide = tf.as_dtype(self._wider[value.tensor.dtype]).as_numpy_dtype
            array = tf.make_ndarray(value.tensor).astype(wide)
            value.tensor.CopyFrom(tf.make_tensor_proto(array))


def _fix(draw: Any, number: Any) -> None:
    """Has an operation of a function give one number instead of random ones."""
    dtype = tf.as_dtype(draw.attr["dtype"].type if "dtype" in draw.attr else draw.attr["Tout"].type)
    value = np.asarray(_DRAWN_INSIDE if dtype.is_floating else 0, dtype.as_numpy_dtype)
    number.name, number.op = f"{draw.name}_fixed", "Const"
    number.attr["dtype"].type = dtype.as_datatype_enum
    number.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    index = draw.attr["Tshape" if "Tshape" in draw.attr else "T"].type
    shape = draw.input[0]
    draw.op = "Fill"
    del draw.input[:]
    draw.input.extend([shape, f"{number.name}:output:0"])
    draw.attr.clear()
    draw.attr["T"].type = dtype.as_datatype_enum
    draw.attr["index_type"].type = index
