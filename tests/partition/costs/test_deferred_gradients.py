"""How gradients that are products are collected: decided once, for the plan and for the runtime."""

from __future__ import annotations

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from tarantella_pp.partition.costs.deferred_gradients import MatmulChunks
from tarantella_pp.partition.costs.optimizer_slots import optimizer_state_bytes
from tarantella_pp.partition.costs.peak_memory import factor_bytes
from tarantella_pp.partition.costs.stage_costs import StageCostModel
from tarantella_pp.partition.extraction.keras_reader import extract

WIDTH = 2048
KERNEL = 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("micro_batches", "rows", "number", "size"),
    [
        (1, 64, None, None),  # there is nothing to sum
        (2, 64, 1, 2),
        (8, 64, 1, 8),
        (16, 64, 2, 8),  # 1024 rows
        (4, 256, 2, 2),
        (7, 256, None, None),  # four fit, which is too few to multiply as they come
        (17, 64, 3, 6),
        (33, 64, 5, 7),  # 16 fit
        (16, 0, None, None),
    ],
)
def test_chunks_of_a_square_kernel(micro_batches, rows, number, size):
    found = MatmulChunks.of(micro_batches, rows, WIDTH, WIDTH)
    assert (found and found.number, found and found.size) == (number, size)


@given(st.integers(1, 99), st.integers(0, 600), st.integers(1, 3000), st.integers(1, 3000))
def test_chunks_hold_all_micro_batches_and_no_more_factors_than_fit(count, rows, inputs, outputs):
    found = MatmulChunks.of(count, rows, inputs, outputs)
    if found is None:
        return
    factors, gradient = rows * (inputs + outputs), inputs * outputs
    assert (found.number - 1) * found.size < count <= found.number * found.size
    assert found.fits == (count * factors <= gradient)
    assert found.beside_sum * factors <= gradient
    assert (found.beside_sum > 0) == (found.number > 1)


@pytest.mark.keras
def test_gradients_that_are_cast_are_not_collected():
    inputs = keras.Input((WIDTH,))
    for policy, counted in (("float32", True), ("mixed_bfloat16", False)):
        dense = layers.Dense(WIDTH, dtype=policy)
        graph = extract(keras.Model(inputs, dense(inputs))).graph
        assert any(factor_bytes(graph, graph.nodes, 64, 16)) == counted


@pytest.mark.keras
def test_a_plan_counts_factors_besides_sums():
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(WIDTH, activation="relu")(inputs)
    x = layers.Dense(WIDTH, trainable=False)(layers.Dense(WIDTH)(x))
    graph = extract(keras.Model(inputs, layers.Dense(10)(x))).graph
    row = 2 * 4 * WIDTH
    assert factor_bytes(graph, graph.nodes, 64, 8) == (0, 0)
    assert factor_bytes(graph, graph.nodes, 64, 16) == (
        2 * 8 * 64 * row,
        2 * KERNEL + 8 * 64 * row,
    )
    assert factor_bytes(graph, graph.nodes, 64, 17) == (
        2 * 12 * 64 * row,
        2 * KERNEL + 6 * 64 * row,
    )
    slots = optimizer_state_bytes("sgd", graph.weights)
    stages = [StageCostModel(graph, slots, 64, None, m).stages([0] * 4, [1])[0] for m in (8, 16)]
    assert stages[0].state_bytes == stages[1].state_bytes
    assert stages[0].activation_bytes_total == stages[1].activation_bytes_total
    extra = stages[1].working_bytes - stages[0].working_bytes
    assert extra >= 2 * 8 * 64 * row
