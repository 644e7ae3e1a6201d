"""What a plan says of its step is what the simulator says, and what the ranks run."""

import functools
from dataclasses import replace

import keras
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ScheduleError
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.partition.plan_search import PlanSearch, choose_plan
from tarantella_pp.partition.planner import Planner
from tarantella_pp.schedule import (
    BEFORE_SEARCH,
    SEARCHED,
    TRAINING_NAMES,
    V_SHAPED,
    ScheduleSpec,
    lower,
    make_schedule,
    simulate,
    validate,
)

pytestmark = pytest.mark.keras

BATCH_SIZE = 5040
"""Divided by all numbers of micro-batches up to 10."""


@functools.cache
def planner():
    x = inputs = keras.Input((24,))
    for width in (64, 8, 48, 96, 16, 24, 80, 32, 8, 64, 40, 24):
        x = layers.Dense(width, activation="relu")(x)
    return Planner.of(keras.Model(inputs, layers.Add()([x, inputs])), machine=tnt.HardwareSpec())


def plan_of(spec, micro_batches, **given):
    options = {"batch_size": BATCH_SIZE, "balance": "memory", "recompute": "none"}
    asked = PlanOptions(
        num_stages=spec.num_stages, num_micro_batches=micro_batches, **{**options, **given}
    )
    return choose_plan([PlanSearch(planner(), asked, spec)])


@st.composite
def specs(draw):
    """Every schedule on every number of ranks."""
    name = draw(st.sampled_from(TRAINING_NAMES))
    ranks = draw(st.integers(1, 4))
    stages = ranks * (2 if name in V_SHAPED else draw(st.integers(1, 3)))
    return ScheduleSpec.of(name, stages, ranks)


@given(
    spec=specs(),
    micro_batches=st.integers(1, 10),
    balance=st.sampled_from(["memory", "flops"]),
    recompute=st.sampled_from(["none", "all", (0,)]),
    limit=st.sampled_from([None, "1TB"]),
)
def test_a_plan_says_what_the_simulator_says(spec, micro_batches, balance, recompute, limit):
    options = {"balance": balance, "recompute": recompute, "memory_limit": limit}
    plan = plan_of(spec, micro_batches, **options)
    held = [stage.in_flight for stage in plan.stages]
    schedule = plan.schedule_spec().make(micro_batches)
    assert bool(schedule.repeated) <= bool(limit and plan.recompute and spec.num_ranks > 1)
    schedule = lower(schedule, plan.links, plan.gradient_links)
    validate(schedule, held)
    assert held == list(schedule.held)
    simulation = PlanSimulation(plan, tnt.HardwareSpec(), plan.schedule, micro_batches)
    timeline = simulate(schedule, simulation.costs())
    shown = simulation.step()
    if spec.name == SEARCHED:  # what runs till then is a schedule that the search begins with
        assert shown.pipeline_seconds <= timeline.pipeline_seconds * (1 + 1e-12)
    else:
        assert plan.bubble == pytest.approx(timeline.bubble_fraction, abs=1e-12)
        assert shown.peak_bytes == timeline.peak_bytes
    for rank in range(spec.num_ranks):
        memory = [plan.stages[stage].memory_bytes for stage in schedule.stages_of(rank)]
        if len(memory) == 1:
            assert timeline.peak_bytes[rank] == sum(memory)
        for peaks in (timeline.peak_bytes, shown.peak_bytes):
            assert peaks[rank] <= sum(memory)  # stages hold the most at different moments


def test_messages_count_as_they_travel():
    spec = ScheduleSpec.of("1f1b", 3)
    wide, narrow = (plan_of(spec, 6, wire_dtype=dtype) for dtype in (None, "bfloat16"))
    assert narrow == tnt.Plan.from_json(narrow.to_json())
    assert "sent as bfloat16" in str(narrow)
    assert "bfloat16" not in str(wide)
    machine = tnt.HardwareSpec(bandwidth=1e6, latency=0.0)
    of_own = msgspec.structs.replace(wide, wire_dtype="bfloat16")  # the same stages
    slow, fast = (PlanSimulation(plan, machine, "1f1b", 6).costs() for plan in (wide, of_own))
    for pair, link in slow.links.items():
        assert fast.links[pair].seconds == link.seconds / 2
    assert of_own.sent_bytes() == wide.sent_bytes() / 2 == sum(map(wide.sent_bytes, (0, 1))) / 2


@given(
    spec=specs(),
    micro_batches=st.integers(1, 10),
    recompute=st.sampled_from(["none", "all", (0,)]),
    split_factor=st.sampled_from([0.9, 1.0, 1.2]),
)
@example(ScheduleSpec.of(SEARCHED, 8, 4), 6, "none", 0.9)
def test_no_step_is_below_its_bound(spec, micro_batches, recompute, split_factor):
    """Else a plan could be ruled out that is the fastest."""
    machine = tnt.HardwareSpec(
        action_seconds=1e-6, split_factor=split_factor, bandwidth=None, latency=0.0
    )
    asked = PlanOptions(
        num_stages=spec.num_stages, num_micro_batches=micro_batches, batch_size=BATCH_SIZE,
        balance="flops", recompute=recompute,
    )  # fmt: skip
    search = PlanSearch(replace(planner(), machine=machine), asked, spec)
    (candidate,) = search.candidates()
    name = BEFORE_SEARCH if spec.name == SEARCHED else spec.name
    step = PlanSimulation(candidate.timed[1], machine, name, micro_batches).step()
    assert candidate.least_seconds <= step.pipeline_seconds * (1 + 1e-9)
    if spec.num_ranks == 1 and recompute == "none" and split_factor == 1.0:
        work = step.pipeline_seconds - machine.action_seconds * len(step.events[0])
        assert candidate.least_seconds == pytest.approx(work, rel=0.1)


def test_a_schedule_of_the_users_is_shown_on_its_ranks_alone():
    custom = replace(make_schedule("1f1b", 4, 2), name="mine")
    plan = plan_of(ScheduleSpec.of(custom, 4), 2)
    simulation = PlanSimulation(plan, tnt.HardwareSpec(), plan.schedule, 2)
    assert {point.num_ranks % 4 for point in simulation.curve(simulation.step())} == {0}
    assert simulation.step(1).num_ranks == 1
    with pytest.raises(ScheduleError, match="'mine' is one of 4 stages on 4 ranks"):
        simulation.step(2)
