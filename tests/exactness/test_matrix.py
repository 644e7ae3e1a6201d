"""Whatever Keras has: trained on two ranks with the numbers of plain Keras, or refused by name."""

import pytest

from tarantella_pp.runtime.batch_step import BatchStep
from tests.exactness import matrix, table
from tests.exactness.expected import DIFFERS, unexpected
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


@pytest.mark.slow
def test_a_wrong_share_of_a_micro_batch_is_noticed(monkeypatch):
    honest = BatchStep.loss_gradients

    def wrong(step, micro_batch):
        share = 1.001 if micro_batch == 0 else 1.0
        return {port: share * value for port, value in honest(step, micro_batch).items()}

    monkeypatch.setattr(BatchStep, "loss_gradients", wrong)
    (verdict,) = matrix.judge("losses", "Huber")
    assert verdict.outcome == DIFFERS
