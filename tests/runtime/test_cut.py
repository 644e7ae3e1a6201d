"""The order in which a cut graph runs backward."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.runtime.cut import Trace, cut


def traced(weights):
    """A chain of products, one for each weight, with its gradients."""
    found = {}

    def run(x):
        y = x
        for weight in weights:
            y = tf.tanh(tf.matmul(y, weight))
        seed = tf.compat.v1.placeholder(y.dtype, y.shape)
        variables = list({id(weight): weight for weight in weights}.values())
        back, *gradients = tf.gradients(y, [x, *variables], grad_ys=seed)
        found.update(x=x, seed=seed, y=y, back=back, gradients=gradients)
        return y

    spec = tf.TensorSpec((3, 4), tf.float64)
    function = tf.function(run, input_signature=[spec], autograph=False).get_concrete_function()
    return Trace(
        function, [found["x"]], [found["seed"]], [found["y"]], [found["back"]], found["gradients"]
    )


def new_weight(seed):
    return tf.Variable(np.random.default_rng(seed).normal(size=(4, 4)))


def ancestors(op):
    found, todo = set(), [op]
    while todo:
        op = todo.pop()
        above = [*(t.op for t in op.inputs), *op.control_inputs]
        todo += [other for other in above if other not in found]
        found.update(above)
    return found


def test_each_weight_gradient_comes_before_the_input_gradient_of_its_operation():
    parts = cut(traced([new_weight(i) for i in range(4)]))
    found = []
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in parts.residuals]
    specs.insert(0, tf.TensorSpec((3, 4), tf.float64))
    run = tf.function(lambda *fed: found.extend(parts.backward(*fed)), specs, autograph=False)
    run.get_concrete_function()
    back, *gradients = found
    before = ancestors(back.op)
    assert all(gradient.op in before for gradient in gradients)


@pytest.mark.parametrize("uses", [[0, 1, 0], [0, 0, 0], [0, 1, 2, 1, 0]])
def test_a_weight_may_be_used_again(uses):
    variables = [new_weight(i) for i in range(3)]
    weights = [variables[i] for i in uses]
    parts = cut(traced(weights))
    x, seed = (tf.constant(np.random.default_rng(i).normal(size=(3, 4))) for i in (8, 9))

    def run(x, seed):
        return parts.backward(seed, *parts.forward(x)[1:])

    used = list({id(weight): weight for weight in weights}.values())
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for weight in weights:
            y = tf.tanh(tf.matmul(y, weight))
    expected = tape.gradient(y, [x, *used], output_gradients=seed)
    for found, right in zip(tf.function(run, autograph=False)(x, seed), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-12)
