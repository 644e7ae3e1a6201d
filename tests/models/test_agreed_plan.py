"""The plan that all ranks agree on: within the memory that there is, unless a limit is given."""

import warnings

import pytest

from tarantella_pp.models import agreed_plan
from tarantella_pp.models.pipeline_model import PipelineModel
from tests.zoo import models

pytestmark = pytest.mark.keras

OPTIONS = {"num_stages": 2, "num_micro_batches": 2, "batch_size": 4096, "schedule": "gpipe"}


def planned(monkeypatch, memory, **options):
    monkeypatch.setattr(agreed_plan, "memory_of_each_rank", lambda *_: memory)
    return PipelineModel(models.causal_attention(), **OPTIONS, **options).plan


def needed(plan):
    return sum(stage.memory_bytes for stage in plan.stages)  # one process has all of them


def test_a_plan_that_does_not_fit_gives_way_to_one_that_does(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free = planned(monkeypatch, 1 << 60)
        fitting = planned(monkeypatch, needed(free) - 1)
    assert needed(fitting) < needed(free)
    assert fitting.recompute
    assert fitting.memory_limit is None


def test_where_no_plan_fits_a_warning_has_both_numbers_and_what_would(monkeypatch):
    told = r"would need .*memory of this machine is 1\.00 KiB\. .*The smallest that works is"
    with pytest.warns(UserWarning, match=told):
        plan = planned(monkeypatch, 1024)
    assert plan.assignment == planned(monkeypatch, 1 << 60).assignment


def test_a_limit_that_is_given_is_kept(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(monkeypatch, 1024, memory_limit="100GB").memory_limit == 10**11
