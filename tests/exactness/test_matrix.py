"""Whatever Keras has: trained on two ranks with the numbers of plain Keras, or refused by name."""

import pytest

from tests.exactness import matrix, table
from tests.exactness.expected import unexpected
from tests.helpers.draws import more_asked_for

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

QUICK = {
    "losses": "(Huber, sum|SparseCategoricalCrossentropy, sum_over_batch_size), masked, weighted$",
    "layers": "(Embedding|LayerNormalization)$",
}


@pytest.mark.parametrize("kind", QUICK)
def test_some_of_a_kind_in_one_process(kind):
    verdicts = matrix.judge(kind, QUICK[kind])
    assert len(verdicts) > 1
    assert unexpected(kind, verdicts) == []


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("kinds", matrix.LAUNCHES, ids="-".join)
def test_all_of_keras_on_two_ranks(kinds):
    """And the table in the docs says so."""
    for kind, verdicts in matrix.judge_on_two_ranks(kinds).items():
        assert unexpected(kind, verdicts) == []
        if more_asked_for() or kind not in ("losses", "layers"):
            assert table.row(kind, verdicts) in table.PAGE.read_text()
