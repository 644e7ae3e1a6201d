from __future__ import annotations

import numpy as np
import pytest

from tarantella_pp.errors import ReplicaError
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tests.helpers.mpi import find_mpiexec, mpi_run

pytestmark = [
    pytest.mark.keras,
    pytest.mark.mpi,
    pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec"),
]


def compare() -> list[str]:
    """Three ranks: all is the same; then the last has one bit less; then one weight more."""
    import keras

    from tarantella_pp.runtime.weights.rank_weights import check_replicas

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
        assert "on rank 2;" in bit
        assert "on ranks 1, 0." in bit
        assert "1 of 2 variables differ" in bit
        assert "nothing on ranks 1, 0" in more


def test_one_replica_is_equal_to_itself() -> None:
    from tarantella_pp.runtime.weights.rank_weights import check_replicas

    check_replicas([object()], Communicator())
