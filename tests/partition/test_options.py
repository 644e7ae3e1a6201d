"""Options: numbers of layers for each stage, and the bytes of gradients summed at a time."""

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.options import assignment_of
from tarantella_pp.partition.plan.gradient_buckets import fusion_threshold_of
from tests.zoo import models

pytestmark = pytest.mark.keras


def test_the_option_counts_more_than_the_environment(monkeypatch):
    monkeypatch.delenv("TNT_FUSION_THRESHOLD", raising=False)
    assert fusion_threshold_of(None) == 32 * 2**20
    monkeypatch.setenv("TNT_FUSION_THRESHOLD", " 20kB ")
    assert fusion_threshold_of(None) == 20_000
    assert fusion_threshold_of("1MiB") == 2**20
    with pytest.raises(ConfigurationError, match="fusion_threshold=0"):
        fusion_threshold_of(0)
    monkeypatch.setenv("TNT_FUSION_THRESHOLD", "much")
    with pytest.raises(ConfigurationError, match="TNT_FUSION_THRESHOLD='much'"):
        fusion_threshold_of(None)


def nested(names=("a", "block", "c", "d")):
    """Four layers, of which the second has three operations."""
    first, block, third, last = names
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6), layers.ReLU(), layers.Dense(6)], name=block
    )
    start, drop = layers.Dense(6, name=first), layers.Dropout(0.1, name=third)
    return models.chain((6,), start, inner, drop, layers.Dense(2, name=last))


@pytest.mark.parametrize(
    ("names", "balance", "expected"),
    [
        (("a", "block", "c", "d"), [2, 2], (0, 0, 0, 0, 1, 1)),
        (("a", "block", "c", "d"), (1, 1, np.int64(2)), (0, 1, 1, 1, 2, 2)),
        (("a", "block", "c", "d"), [3, 3], (0, 0, 0, 1, 1, 1)),  # six operations
        (("l0", "l2", "l3_drop", "l9"), [3, 7], (0, 0, 0, 0, 1, 1)),  # l1 does nothing
    ],
)
def test_layers_are_counted(names, balance, expected):
    model = nested(names)
    assert assignment_of(extract(model).graph, balance) == expected
    plan = tnt.make_plan(model, balance=balance, memory_limit="1GB")
    assert plan.assignment == expected
    assert (plan.balance, plan.num_stages) == ("given", len(balance))
    assert "Balanced as given: largest stage" in str(plan)
    assert tnt.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "balance", [[], [0, 4], [-1, 5], [1.0, 3], [True, 3], ["2", "2"], [2, 3], [4, 1]]
)
def test_numbers_that_mean_nothing_are_refused(balance):
    with pytest.raises(ConfigurationError, match="Received: balance="):
        tnt.make_plan(nested(), balance=balance)


def test_stages_that_cannot_be_are_refused():
    with pytest.raises(ConfigurationError, match="for each of 3 stages"):
        tnt.make_plan(nested(), 3, balance=[2, 2])
    with pytest.raises(ConfigurationError, match="balance='given'"):
        tnt.make_plan(nested(), 2, balance="given")
    with pytest.raises(ConfigurationError, match="on the later stage"):
        tnt.make_plan(nested(("l9", "l2", "l3", "l4")), balance=[5, 5])
    with pytest.raises(ConfigurationError, match=r"Stages \[1\] would have no operations"):
        tnt.make_plan(nested(("l0", "l1", "l2", "l9")), balance=[5, 3, 2])
    with pytest.raises(PlanError, match="memory_limit='1kB'"):
        tnt.make_plan(nested(), balance=[2, 2], memory_limit="1kB")


def test_what_is_left_open_is_chosen_for_given_stages():
    model = models.batch_norm_cnn()
    ours = tnt.make_plan(model, 2, balance="memory", num_micro_batches=4, schedule="1f1b")
    counts = np.bincount(ours.assignment).tolist()
    given = tnt.make_plan(model, balance=counts, num_micro_batches=4, schedule="1f1b")
    assert given.assignment == ours.assignment
    assert given.stages == ours.stages
    assert given.certificate.value == ours.certificate.value
    assert not given.certificate.optimal
    free = tnt.make_plan(model, balance=counts)
    assert free.step_seconds <= given.step_seconds
