"""The order in which a cut graph runs backward."""

import itertools

import numpy as np
import tensorflow as tf

from tarantella_pp.partition.graph.least_kept import FLOPS_PER_BYTE
from tarantella_pp.runtime.stage.graph_functions import CompiledFunction, ancestors, specs_of
from tarantella_pp.runtime.stage.graph_split import Trace, split_graph


def product(y, weight, bias):
    return tf.nn.softplus(tf.matmul(y, weight) + bias)


def gated(y, weight, bias):
    z = tf.cast(y, tf.float32)
    z *= tf.math.rsqrt(tf.reduce_mean(tf.square(z), -1, keepdims=True))
    gate = tf.cast(z, y.dtype) * bias @ weight
    return y + (tf.nn.silu(gate) * (tf.cast(z, y.dtype) * bias @ weight)) @ weight


def masked(y, weight, bias):
    mask = tf.linalg.band_part(tf.ones((128, 4, 128, 4)), -1, 0)  # 1 MiB, of constants alone
    return y @ weight + tf.reduce_sum(tf.reshape(y, (3, 1, 1, 1, 4)) * tf.cast(mask, y.dtype))


def traced(weights, biases=(), worth=0.0, block=product):
    """A chain of products, one for each weight, with its gradients."""
    found = {}

    def run(x):
        y = x
        for weight, bias in itertools.zip_longest(weights, biases, fillvalue=0.0):
            y = block(y, weight, bias)
        seed = tf.compat.v1.placeholder(y.dtype, y.shape)
        variables = list({id(weight): weight for weight in (*weights, *biases)}.values())
        back, *gradients = tf.gradients(y, [x, *variables], grad_ys=seed)
        found.update(x=x, seed=seed, y=y, back=back, gradients=gradients)
        return y

    spec = tf.TensorSpec((3, 4), tf.float64)
    function = tf.function(run, input_signature=[spec], autograph=False).get_concrete_function()
    return Trace(
        function, [found["x"]], [found["seed"]], [found["y"]], [found["back"]], found["gradients"],
        lambda op: worth,
    )  # fmt: skip


def new_weight(seed):
    return tf.Variable(np.random.default_rng(seed).normal(size=(4, 4)))


def operations_of(part, fed):
    """The types of the operations of a part, and what it returns."""
    found = []
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in fed]
    run = tf.function(lambda *given: found.extend(part(*given)), specs, autograph=False)
    operations = run.get_concrete_function().graph.get_operations()
    not_given = [op.name for op in operations if op.type == "Placeholder" and "part" in op.name]
    assert not not_given
    return [op.type for op in operations], found


def test_each_weight_gradient_comes_before_the_input_gradient_of_its_operation():
    trace = traced([new_weight(i) for i in range(4)])
    parts = split_graph(trace)
    _, (back, *gradients) = operations_of(parts.backward, [*trace.seeds, *parts.residuals])
    assert all(gradient.op in ancestors([back]) for gradient in gradients)


def test_sums_over_rows_come_with_input_gradients_and_only_operands_of_products_are_kept():
    trace = traced([new_weight(0), new_weight(1)], [tf.Variable(np.zeros(4)) for _ in range(2)])
    parts = split_graph(trace)
    kept = [*parts.kept_for_w, *parts.b_to_w]
    weight_part, gradients = operations_of(parts.backward_weight, kept)
    input_part, _ = operations_of(parts.backward_input, [*trace.seeds, *parts.residuals])
    assert weight_part.count("MatMul") == 2
    assert "Sum" not in weight_part
    assert input_part.count("Sum") == 2
    assert [tuple(g.shape) for g in gradients] == [(4, 4), (4, 4), (4,), (4,)]
    assert [tensor.op.type for tensor in parts.kept_for_b] == ["Sigmoid", "Sigmoid"]
    assert [tensor.op.type for tensor in parts.kept_for_w] == ["Placeholder", "Softplus"]
    assert sorted(tuple(tensor.shape) for tensor in parts.b_to_w) == [(3, 4), (3, 4), (4,), (4,)]


def test_operations_run_again_only_when_the_backward_pass_has_come_to_them():
    """Else a backward pass would have all of them in memory at a time."""
    weights = [new_weight(i) for i in range(4)]
    trace = traced(weights, worth=FLOPS_PER_BYTE)
    parts = split_graph(trace)
    assert len(parts.residuals) < len(split_graph(traced(weights)).residuals)
    fed = [*trace.seeds, *parts.residuals]
    _, (back, *_) = operations_of(parts.backward, fed)
    again = [op for op in ancestors([back]) if op.type in ("Softplus", "Sigmoid")]
    (seed,) = (op for op in ancestors([back]) if op.name == back.graph.inputs[0].op.name)
    at_once = [op for op in again if seed not in ancestors(op.outputs)]
    assert len(again) > 3
    assert len(at_once) <= 1  # of the last product, which is first


def test_no_part_takes_what_it_is_not_given():
    trace = traced(
        [new_weight(i) for i in range(8)],
        [tf.Variable(np.ones(4)) for _ in range(8)],
        FLOPS_PER_BYTE,
        gated,
    )
    parts = split_graph(trace)
    operations_of(parts.backward_input, [*trace.seeds, *parts.residuals])
    operations_of(parts.backward_weight, [*parts.kept_for_w, *parts.b_to_w])


def test_equal_constants_of_layers_are_computed_once_and_are_in_no_graph():
    trace = traced([new_weight(i) for i in range(3)], block=masked)
    parts = split_graph(trace)
    types, (y, *_) = operations_of(parts.forward, trace.inputs)
    large = [op for op in y.graph.get_operations() if op.outputs and op.outputs[0].shape.rank == 4]
    assert [tuple(op.outputs[0].shape) for op in large] == [(128, 4, 128, 4)]
    assert "MatrixBandPart" not in types
    x, run = tf.ones((3, 4), tf.float64), CompiledFunction(parts.forward, specs_of(trace.inputs))
    np.testing.assert_array_equal(run(x)[0], trace.function(x))
    mask = next(op for op in trace.function.graph.get_operations() if op.type == "Cast").outputs
    assert CompiledFunction(trace.extractor.extract([], mask), [])()[0].shape == mask[0].shape
