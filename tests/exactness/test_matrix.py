"""Whatever Keras has: trained on two ranks with the numbers of plain Keras, or refused by name."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tarantella_pp.runtime.batch_step import BatchStep
from tests.exactness import callbacks, layers, losses, metrics, optimizers, table
from tests.exactness.expected import DIFFERS, Verdict, unexpected
from tests.exactness.trials import Judge
from tests.helpers.draws import more_asked_for
from tests.helpers.mpi import mpi_run
from tests.helpers.training import use_float64

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

KINDS = {
    "losses": losses,
    "metrics": metrics,
    "layers": layers,
    "optimizers": optimizers,
    "callbacks": callbacks,
}
LAUNCHES = (("losses", "metrics", "optimizers", "callbacks"), ("layers",))
"""What one launch of two ranks tries."""
QUICK = {
    "losses": "(Huber, sum|SparseCategoricalCrossentropy, sum_over_batch_size), masked, weighted$",
    "layers": "(Embedding|LayerNormalization)$",
}


def judge(kind: str, pattern: str = "") -> list[Verdict]:
    """Judges all of a kind whose names match a regular expression from their start on."""
    parts = [part for part in KINDS[kind].parts() if re.match(pattern, part.name)]
    return Judge(kind, KINDS[kind].trial).judge(parts)


def judge_on_rank(kinds: Sequence[str]) -> dict[str, Any]:
    use_float64()
    return {kind: list(map(dataclasses.asdict, judge(kind))) for kind in kinds}


def judge_on_two_ranks(kinds: Sequence[str]) -> dict[str, list[Verdict]]:
    """Judges some kinds on two ranks, which must agree on all verdicts."""
    # A rank that fails alone leaves the others waiting.
    env = {"TNT_TIMEOUT": "60"}
    first, second = mpi_run(2, judge_on_rank, kinds, timeout=1200, env=env).check().results
    assert first == second
    return {kind: [Verdict(**v) for v in verdicts] for kind, verdicts in first.items()}


@pytest.mark.parametrize("kind", QUICK)
def test_some_of_a_kind_in_one_process(kind):
    verdicts = judge(kind, QUICK[kind])
    assert len(verdicts) > 1
    assert unexpected(kind, verdicts) == []


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("kinds", LAUNCHES, ids="-".join)
def test_all_of_keras_on_two_ranks(kinds):
    """And the table in the docs says so."""
    for kind, verdicts in judge_on_two_ranks(kinds).items():
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
    (verdict,) = judge("losses", "Huber")
    assert verdict.outcome == DIFFERS
