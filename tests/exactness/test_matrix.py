"""Whatever Keras has: trained on two ranks with the numbers of plain Keras, or refused by name."""

from __future__ import annotations

import functools
from collections import Counter

import keras
import pytest

from tarantella_pp.runtime.batch_step import BatchStep
from tests.exactness import expected, layers, matrix, table
from tests.exactness.trials import (
    BY_MICRO_BATCH,
    DIFFERS,
    EXACT,
    REFUSED,
    Judge,
    Verdict,
    together,
)
from tests.helpers.draws import more_asked_for

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

QUICK = {
    "losses": "(Huber, sum|SparseCategoricalCrossentropy, sum_over_batch_size), masked, weighted$",
    "layers": "(Embedding|LayerNormalization)$",
}


def check(kind, verdicts):
    """Each verdict is exact or expected for a reason."""
    wrong = expected.unexpected(kind, verdicts)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", QUICK)
def test_some_of_a_kind_in_one_process(kind):
    verdicts = Judge().judge(together(matrix.trials_of(kind, QUICK[kind])))
    assert len(verdicts) > 1
    check(kind, verdicts)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("kinds", matrix.LAUNCHES, ids="-".join)
def test_all_of_keras_on_two_ranks(kinds):
    """And the table in the docs says so."""
    for kind, verdicts in matrix.judge_on_two_ranks(kinds).items():
        check(kind, verdicts)
        if more_asked_for() or kind != "losses":
            stale = expected.unused(kind, verdicts)
            assert not stale, f"no longer so: {stale}"
        if more_asked_for() or kind not in ("losses", "layers", "optimizers"):
            assert table.row(kind, verdicts) in table.PAGE.read_text()


def test_a_new_row_takes_the_place_of_the_old_one():
    verdicts = [
        Verdict("Dense", EXACT),
        Verdict("Dropout", BY_MICRO_BATCH),
        Verdict("MixUp", REFUSED),
    ]
    page = table.PAGE.read_text()
    assert table.page(page, {}) == page
    assert all(page.count(f"\n| {title} | ") == 1 for title in table.TITLES.values())
    text = table.page(page, {"layers": table.row("layers", verdicts)})
    assert f"| Layers | 3 | 1 | 1: {expected.SEVERAL_SAMPLES} | 1: {expected.RANDOM} |\n" in text
    assert text.count("| Layers |") == 1


@pytest.mark.slow
def test_a_pipeline_that_is_wrong_is_noticed(monkeypatch):
    honest = BatchStep.loss_gradients

    def wrong(step, micro_batch):
        return {port: 1.001 * value for port, value in honest(step, micro_batch).items()}

    monkeypatch.setattr(BatchStep, "loss_gradients", wrong)
    trials = [trial for kind, pattern in QUICK.items() for trial in matrix.trials_of(kind, pattern)]
    found = Judge().judge(together(trials))
    assert Counter(v.outcome for v in found) == {DIFFERS: 4}


@pytest.mark.parametrize("name", layers.NOT_BUILT)
def test_layers_that_cannot_be_tried_are_left_out_alone(name):
    kind = getattr(keras.layers, name)
    with pytest.raises(ExceptionGroup, match="cannot run"):
        layers.middle_of(name, functools.partial(layers.make, kind))


@pytest.mark.parametrize("kind", matrix.KINDS)
def test_what_is_left_out_is_there(kind):
    """A name that Keras no longer has would hide nothing, but say so."""
    public = {"losses": keras.losses, "metrics": keras.metrics, "layers": keras.layers}
    public |= {"optimizers": keras.optimizers, "callbacks": keras.callbacks}
    for name, reason in matrix.KINDS[kind].NOT_TRIED.items():
        assert hasattr(public[kind], name)
        assert reason
