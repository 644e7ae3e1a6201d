"""Sums of gradients that are products: collected by their factors, multiplied later."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.costs import deferred_gradients
from tarantella_pp.partition.costs.deferred_gradients import MatmulChunks
from tarantella_pp.runtime.modules.deferred_matmul import DeferredMatmul, DeferredMatmulSum
from tarantella_pp.runtime.modules.gradient_accumulator import GradientAccumulator

pytestmark = pytest.mark.keras

INPUTS, OUTPUTS = 12, 10


def products(count, rows=1, inputs=INPUTS, outputs=OUTPUTS):
    rng = np.random.default_rng(count)
    return [
        DeferredMatmul(
            tf.constant(rng.normal(size=(rows, inputs))),
            tf.constant(rng.normal(size=(rows, outputs))),
        )
        for _ in range(count)
    ]


def plain_sum(given):
    return sum(product.left.numpy().T @ product.right.numpy() for product in given)


def test_products_are_found_in_a_graph():
    def trace(x, upstream):
        kernel, turned, bias = tf.ones((16, 8)), tf.ones((8, 16)), tf.ones(8)
        for weight, y in (
            (kernel, tf.matmul(x, kernel)),
            (turned, tf.matmul(x, turned, transpose_b=True)),
        ):
            product = DeferredMatmul.of(tf.gradients(y, weight, upstream)[0])
            assert (product.value().shape, product.left.shape[0]) == (weight.shape, 4)
        assert DeferredMatmul.of(tf.gradients(x[:, :8] + bias, bias, upstream)[0]) is None
        assert DeferredMatmul(x[:1], upstream[:1]).chunking(5) == MatmulChunks.of(5, 1, 16, 8)
        assert DeferredMatmul(x[:1], upstream[:1]).chunking(6) is None
        return x

    def of_any_rows(x, upstream):
        assert DeferredMatmul(x, upstream).chunking(2) is None
        return x

    for rows, function in ((4, trace), (None, of_any_rows)):
        specs = [tf.TensorSpec((rows, columns)) for columns in (16, 8)]
        tf.function(function, input_signature=specs, autograph=False).get_concrete_function()


@given(
    count=st.integers(1, 9),
    size=st.integers(1, 9),
    waits=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_the_sum_has_the_same_bits_whenever_it_is_worked_at(count, size, waits):
    given_ones = products(count)
    found = []
    for used in (waits, [False] * 9):
        total = DeferredMatmulSum(MatmulChunks(-(-9 // size), size, fits=True))
        for product, wait in zip(given_ones, used, strict=False):
            total.add(product)
            if wait and total.is_due:
                total.multiply()
        found.append(DeferredMatmulSum.value(total.take()).numpy())
        assert total.take() == {}
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], plain_sum(given_ones), atol=1e-12)


def test_a_sum_that_was_reset_begins_anew():
    given_ones = products(5)
    total = DeferredMatmulSum(MatmulChunks(2, 3, fits=True))
    for product in given_ones:
        total.add(product)
    total.multiply()
    total.reset()
    assert not total.is_due
    total.add(given_ones[0])
    found = DeferredMatmulSum.value(total.take())
    np.testing.assert_allclose(found, plain_sum(given_ones[:1]), atol=1e-14)


def test_products_and_plain_gradients_of_a_weight_add_up():
    sums = GradientAccumulator([keras.Variable(np.zeros((INPUTS, OUTPUTS)))], micro_batches=3)
    given_ones = products(2)
    assert sums.collects(0, given_ones[0])
    for product in given_ones:
        sums.prepare([product])
        sums.append_sparse(sums.pairs_of([product]))
    plain = np.ones((INPUTS, OUTPUTS))  # of a pass that found no product
    sums.append_sparse(sums.pairs_of([tf.constant(plain)]))
    assert sums.collects(0, given_ones[0])
    found = sums.gradient(0, sums.take_collected())
    np.testing.assert_allclose(found, plain_sum(given_ones) + plain, atol=1e-14)
    assert sums.gradient(0, sums.take_collected()) is None


@pytest.mark.parametrize("micro_batches", [4, 8, 9, 16, 40])
def test_no_more_factors_wait_than_fit(monkeypatch, micro_batches):
    """Stages whose factors do not all fit multiply as they go, some for each micro-batch."""
    shapes = [(17, 16), (18, 17), (30, 30)]
    sums = GradientAccumulator([keras.Variable(np.zeros(shape)) for shape in shapes], micro_batches)
    columns = [products(micro_batches, 1, *shape) for shape in shapes]
    fitting = [8, 8, 15]
    work = []
    multiply = DeferredMatmulSum.multiply
    monkeypatch.setattr(
        DeferredMatmulSum, "multiply", lambda self: work.append(1) or multiply(self)
    )
    steps = []
    for gradients in zip(*columns, strict=True):
        sums.prepare(gradients)
        before = len(work)
        sums.append_sparse(sums.pairs_of(gradients))
        assert sums.flush_overdue() == (len(work) > before)
        steps.append(len(work) - before)
        kept = [len(one._factors) for one in sums._products.values()]
        assert all(rows <= fits for rows, fits in zip(kept, fitting, strict=True))
    assert (sum(steps) > 0) == (micro_batches > min(fitting))
    if micro_batches == 40:
        assert max(steps) <= 2
    collected = sums.take_collected()
    for i, column in enumerate(columns):
        np.testing.assert_allclose(sums.gradient(i, collected), plain_sum(column), atol=1e-12)


@pytest.mark.parametrize(("many", "multiplied"), [(512, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 0])])
def test_what_is_due_is_done_where_there_is_time(monkeypatch, many, multiplied):
    """With rows enough in half of the micro-batches, that half need not wait for the others."""
    monkeypatch.setattr(deferred_gradients, "_MANY_ROWS", many)
    sums = GradientAccumulator([keras.Variable(np.zeros((INPUTS, OUTPUTS)))], micro_batches=5)
    given_ones = products(5)
    found = []
    for product in given_ones:
        sums.prepare([product])
        sums.append_sparse(sums.pairs_of([product]))
        assert not sums.flush_overdue()
        found.append(0)
        while sums.multiply():
            found[-1] += 1
    assert found == multiplied
    sums.finish()
    assert not sums.multiply()
    total = sums.gradient(0, sums.take_collected())
    np.testing.assert_allclose(total, plain_sum(given_ones), atol=1e-13)
