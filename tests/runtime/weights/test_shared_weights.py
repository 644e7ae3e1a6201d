"""Gradients of a weight that several stages use, added up as in one process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.errors import ReplicaError
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.weights.shared_weights import total
from tests.helpers.mpi import find_mpiexec, mpi_run

pytestmark = pytest.mark.keras


def rows(dtype, *indices):
    values = tf.ones((len(indices), 2))
    return tf.IndexedSlices(values, tf.constant(indices, dtype), tf.constant([5, 2]))


def test_rows_looked_up_here_and_elsewhere_are_put_one_behind_the_other():
    """Those of other ranks have indices of 64 bits, whatever the model looks up with."""
    found = total([rows(tf.int32, 1, 3), None, rows(tf.int64, 3)])
    assert found.indices.numpy().tolist() == [1, 3, 3]
    np.testing.assert_array_equal(tf.convert_to_tensor(found).numpy()[:, 0], [0, 1, 0, 2, 0])


def test_rows_and_a_whole_gradient_are_added_up():
    found = total([rows(tf.int32, 1), tf.ones((5, 2))])
    np.testing.assert_array_equal(found.numpy()[:, 0], [1, 2, 1, 1, 1])
    assert total([None, None]) is None


pytestmark = [
    pytest.mark.keras,
    pytest.mark.mpi,
    pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec"),
]


def compare() -> list[str]:
    """Three ranks: all is the same; then the last has one bit less; then one weight more."""
    import keras

    from tarantella_pp.runtime.weights.shared_weights import check_replicas

    ranks, found = world(), []
    ours = ranks.split(0, -ranks.rank)  # numbered the other way around
    for step in range(4):
        one = keras.Variable(
            np.ones((2, 3)), dtype="bfloat16" if step == 3 else None, name="kernel"
        )
        two = keras.Variable(np.zeros(4, "float32"), name="bias")
        if step == 1 and ranks.rank == 2:
            two.assign(np.array([0.0, 0.0, -0.0, 0.0]))
        try:
            check_replicas([one, two] + [two] * (step == 2 and ranks.rank == 2), ours)
        except ReplicaError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


@pytest.mark.slow
def test_the_first_variable_that_differs_is_named_with_its_ranks() -> None:
    results = mpi_run(3, compare, env={"TNT_TIMEOUT": "20"}).check().results
    for same, bit, more, sixteen in results:
        assert same == sixteen == ""
        assert "'bias'" in bit
        assert bit.count(" on rank ") == 3
        assert "1 of 2 variables differ" in bit
        assert "nothing on rank 1, nothing on rank 0" in more


def test_one_replica_is_equal_to_itself() -> None:
    from tarantella_pp.runtime.weights.shared_weights import check_replicas

    check_replicas([object()], Communicator())
