"""Gradients of several replicas, in one launch."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.comm.collectives import LARGEST_IN_ONE_ROUND
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.weights.gradient_reduction import GradientReduction
from tests.helpers.message_cases import run_cases
from tests.helpers.mpi import mpi_run

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.usefixtures("untried")]

SHAPES = {"kernel": (300, 170), "bias": (170,), "gamma": (3,), "scale": (), "table": (50, 4)}
assert 4 * 300 * 170 < LARGEST_IN_ONE_ROUND < 3 * 4 * 300 * 170


def weight(name: str, dtype: str = "float32") -> tf.Variable:
    return tf.Variable(tf.zeros(SHAPES[name], dtype), name=name)


def dense(name: str, rank: int, step: int = 0, dtype: str = "float32") -> np.ndarray:
    random = np.random.default_rng([rank, step, len(name)])
    return np.asarray(random.standard_normal(SHAPES[name])).astype(dtype)


def rows(rank: int, step: int = 0) -> tf.IndexedSlices:
    random = np.random.default_rng([rank, step])
    count = (3 * rank + step) % 5
    indices = random.integers(0, 50, count)
    values = random.standard_normal((count, 4)).astype("float32")
    return tf.IndexedSlices(values, tf.constant(indices, tf.int32), tf.constant([50, 4]))


def bits(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        return [bits(value.values), value.indices.numpy().tolist()]
    return [value.dtype.name, list(value.shape), value.numpy().tobytes().hex()]


def reduced(reduction: GradientReduction, mine: list[Any]) -> list[Any]:
    reduction.start(0, mine)
    return reduction.finish(0)


def packed_and_alone_over_several_steps(ranks: Communicator) -> None:
    names = ["kernel", "bias", "gamma", "scale"]
    weights = {name: weight(name) for name in names}
    buckets = {"all": [*weights.values()], **{n: [w] for n, w in weights.items()}}
    reduction = GradientReduction(ranks, buckets)
    for step in range(3):
        mine = [tf.constant(dense(name, ranks.rank, step)) for name in names]
        order = [*buckets][ranks.rank % 2 :] + [*buckets][: ranks.rank % 2]
        for key in order:
            reduction.start(key, mine if key == "all" else [mine[names.index(key)]])
        reduction.communicator.progress()
        packed = reduction.finish("all")
        for name, one in zip(names, packed, strict=True):
            expected = sum([dense(name, rank, step) for rank in range(ranks.size)])
            assert one.shape == SHAPES[name]
            np.testing.assert_array_equal(one.numpy(), expected)
            assert bits(reduction.finish(name)[0]) == bits(one)


def replicas_without_some_gradients(ranks: Communicator) -> None:
    names = ["kernel", "bias", "gamma"]
    reduction = GradientReduction(ranks, {0: [weight(name) for name in names]})
    last = ranks.size - 1
    # Who has which gradient, step by step; what is not known to be dense comes late.
    plans = [
        {"kernel": [0], "bias": [last], "gamma": []},
        {"kernel": [], "bias": [0, last], "gamma": []},
        {"kernel": [last], "bias": [0], "gamma": [last]},
        {"kernel": [], "bias": [], "gamma": []},
        {"kernel": [0, last], "bias": [0], "gamma": [0]},
    ]
    for step, plan in enumerate(plans):
        mine = [
            tf.constant(dense(name, ranks.rank, step)) if ranks.rank in plan[name] else None
            for name in names
        ]
        for name, one in zip(names, reduced(reduction, mine), strict=True):
            if plan[name]:
                expected = sum([dense(name, rank, step) for rank in sorted(set(plan[name]))])
                np.testing.assert_array_equal(one.numpy(), expected)
            else:
                assert one is None, (step, name)


def slices_in_the_order_of_the_replicas(ranks: Communicator) -> None:
    reduction = GradientReduction(
        ranks, {0: [weight("bias"), weight("table")], 1: [weight("table")]}
    )
    for step in range(3):
        absent = step == 1 and ranks.rank == 0
        mine = None if absent else rows(ranks.rank, step)
        reduction.start(0, [tf.constant(dense("bias", ranks.rank)), mine])
        reduction.start(1, [mine])
        there = [rows(rank, step) for rank in range(ranks.size) if step != 1 or rank]
        values = np.concatenate([one.values for one in there])
        indices = np.concatenate([one.indices for one in there])
        for found in (reduction.finish(0)[1], reduction.finish(1)[0]):
            assert isinstance(found, tf.IndexedSlices)
            np.testing.assert_array_equal(found.values, values)
            np.testing.assert_array_equal(found.indices, indices)
            assert found.dense_shape.numpy().tolist() == [50, 4]


def slices_at_the_same_places_are_added_up(ranks: Communicator) -> None:
    reduction = GradientReduction(ranks, {0: [weight("bias"), weight("table")]})
    chosen = [rows(rank, 3) for rank in range(ranks.size)]
    fixed = [rows(1, 1 + 5 * rank) for rank in range(ranks.size)]
    places = fixed[0].indices
    for step in range(2):
        absent = step == 1 and ranks.rank == 0  # it has no samples
        values = tf.concat([fixed[ranks.rank].values, chosen[ranks.rank].values], 0)
        indices = tf.concat([50 + places, chosen[ranks.rank].indices], 0)  # marked as fixed
        mine = None if absent else tf.IndexedSlices(values, indices)
        found = reduced(reduction, [None, mine])[1]
        expected = tf.concat([one.values for one in chosen[step:]], 0)
        added = sum([one.values for one in fixed[step:]])
        np.testing.assert_allclose(found.values, tf.concat([expected, added], 0), rtol=1e-6)
        expected = tf.concat([one.indices for one in chosen[step:]], 0)
        np.testing.assert_array_equal(found.indices, tf.concat([expected, places], 0))


def the_same_rows_on_all_ranks_are_positions_if_each_is_there_once(ranks: Communicator) -> None:
    reductions = [GradientReduction(ranks, {0: [weight("table")]}, guesses=True) for _ in range(2)]

    def added(reduction: GradientReduction, places: list[int]) -> tf.IndexedSlices:
        values = tf.fill([len(places), 4], 1.0 + ranks.rank)
        slices = tf.IndexedSlices(values, tf.constant(places), tf.constant([50, 4]))
        return reduced(reduction, [slices])[0]

    chosen, alike = [3, ranks.rank], [3, 3]
    for places, copies in ((chosen, None), ([4, 2], 1), (alike, ranks.size), ([5], ranks.size)):
        found = added(reductions[0], places)
        if copies:
            np.testing.assert_array_equal(found.indices, places * copies)
        whole = len(places) * 4 * sum(1 + rank for rank in range(ranks.size))
        assert tf.reduce_sum(found.values) == whole
    with pytest.raises(UnsupportedModelError, match=r"same rows of 'table.*several times"):
        added(reductions[1], alike)


def slices_become_dense_where_a_replica_has_a_tensor(ranks: Communicator) -> None:
    reduction = GradientReduction(ranks, {0: [weight("table")]})
    for step in range(2):
        slices = rows(ranks.rank, step)
        mine = slices if ranks.rank else tf.constant(dense("table", 0, step))
        (found,) = reduced(reduction, [mine])
        expected = dense("table", 0, step)
        for rank in range(1, ranks.size):
            expected = expected + tf.convert_to_tensor(rows(rank, step)).numpy()
        np.testing.assert_array_equal(found.numpy(), expected)


def messages_of_sixteen_bits(ranks: Communicator) -> None:
    names, rank = ["kernel", "bias", "table"], ranks.rank
    reduction = GradientReduction(ranks, {0: [weight(name) for name in names]}, "bfloat16")

    def rounded(array: np.ndarray) -> np.ndarray:
        return tf.cast(tf.cast(array, "bfloat16"), "float32").numpy()

    for step in range(2):
        mine = [tf.constant(dense(name, rank, step)) for name in names[:2]]
        *sums, slices = reduced(reduction, [*mine, rows(rank, step)])
        for name, one in zip(names, sums, strict=False):
            parts = [rounded(dense(name, replica, step)) for replica in range(ranks.size)]
            np.testing.assert_array_equal(one.numpy(), rounded(sum(parts)))
        values = [rows(replica, step).values for replica in range(ranks.size)]
        np.testing.assert_array_equal(slices.values, rounded(np.concatenate(values)))


def every_dtype(ranks: Communicator) -> None:
    dtypes = ["float64", "float32", "float16", "bfloat16"]
    weights = [weight(name, dtype) for dtype in dtypes for name in ("gamma", "bias")]
    reduction = GradientReduction(ranks, {0: weights})
    for _ in range(2):
        mine = [tf.fill(w.shape, tf.cast(ranks.rank + 1, w.dtype)) for w in weights]
        for one, w in zip(reduced(reduction, mine), weights, strict=True):
            assert one.dtype == w.dtype
            assert (one.numpy() == ranks.size * (ranks.size + 1) / 2).all()


def sums_for_their_owners_have_the_same_bits(ranks: Communicator) -> None:
    names = ["kernel", "bias", "table", "gamma", "scale", "kernel"]
    weights = [weight(name) for name in names]
    last = ranks.size - 1
    for owners in ([last, 0, last, 1, 0, 0], [0] * 6, [1, 1, 0, last, last, 0]):
        for wire in (None, "bfloat16"):
            for keys in ([range(6)], [[i] for i in range(6)], [[5, 1], [2, 0, 4], [3]]):
                buckets = {k: [weights[i] for i in own] for k, own in enumerate(keys)}
                whole = GradientReduction(ranks, buckets, wire)
                who = {k: [owners[i] for i in own] for k, own in enumerate(keys)}
                parts = GradientReduction(ranks, buckets, wire, who)
                for step in range(2):
                    mine = [tf.constant(dense(name, ranks.rank, step)) for name in names]
                    mine[2] = rows(ranks.rank, step)
                    for k, own in enumerate(keys):
                        whole.start(k, [mine[i] for i in own])
                        all_of_it = whole.finish(k)
                        parts.start(k, [mine[i] for i in own])
                        part = parts.finish(k)
                        for i, one, other in zip(own, part, all_of_it, strict=True):
                            here = owners[i] == ranks.rank
                            assert bits(one) == (bits(other) if here else None)


CASES = (
    packed_and_alone_over_several_steps,
    replicas_without_some_gradients,
    slices_in_the_order_of_the_replicas,
    slices_at_the_same_places_are_added_up,
    the_same_rows_on_all_ranks_are_positions_if_each_is_there_once,
    slices_become_dense_where_a_replica_has_a_tensor,
    messages_of_sixteen_bits,
    every_dtype,
    sums_for_their_owners_have_the_same_bits,
)


def reduce_gradients() -> dict[str, str]:
    cases = {function.__name__: function for function in CASES}
    return run_cases(list(cases), cases)


def test_replicas() -> None:
    run = mpi_run(3, reduce_gradients, env={"TNT_TIMEOUT": "20"}, timeout=120)
    assert run.check().results == [{}] * 3


def test_one_replica_keeps_its_gradients() -> None:
    reduction = GradientReduction(Communicator(), {0: [weight("bias")] * 3})
    mine = [tf.constant(dense("bias", 0)), rows(1), None]
    assert all(a is b for a, b in zip(reduced(reduction, mine), mine, strict=True))
