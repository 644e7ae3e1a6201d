from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tarantella_pp.errors import ScheduleError
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan_simulation import with_step
from tarantella_pp.partition.visualization import render_html
from tarantella_pp.partition.visualization.step_rows import simulated_step, step_bars
from tarantella_pp.schedule import ScheduleSpec, bubble_fraction
from tarantella_pp.simulation import Costs, LinkCosts
from tarantella_pp.simulation.pipelines import pipeline_step
from tests.helpers.pictured import plan_of, residual_graph


def even_plan(**options):
    """A plan whose stages have equal FLOPs."""
    return plan_of(residual_graph(32), 4, **options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_equal_stages_have_the_bubble_of_the_formula(schedule):
    plan = even_plan(schedule=schedule)
    step = simulated_step(plan)
    formula = float(bubble_fraction(schedule, 4, plan.num_micro_batches))
    assert step.bubble == pytest.approx(formula) == with_step(plan).bubble
    assert step.rank_names[2] == "rank 2 (stage 2)"
    assert not step.in_seconds


def test_rows_are_those_of_the_timeline():
    costs = Costs.uniform(4, forward=0.5, link=LinkCosts(0.1, 0.05))
    played = pipeline_step(ScheduleSpec.of("1f1b", 4), costs, 8)
    step = step_bars(played)
    assert step.length == played.step_seconds
    assert step.bubble == pytest.approx(played.bubble_fraction)
    assert [bar.label for bar in step.of_rank(3)][:4] == ["F0", "BW0", "F1", "BW1"]


def test_on_a_machine_messages_take_time():
    plan = even_plan()
    step = simulated_step(plan, HardwareSpec(latency=1e-3))
    assert step.in_seconds
    assert step.bubble > simulated_step(plan).bubble
    assert "what links allow" in step.note


def test_several_stages_on_a_rank_are_named():
    plan = msgspec.structs.replace(even_plan(), schedule="interleaved")
    step = simulated_step(plan, num_ranks=2)
    assert step.rank_names == ("rank 0 (stages 0, 2)", "rank 1 (stages 1, 3)")
    assert {bar.label[:2] for bar in step.of_rank(0)} >= {"0F", "2F"}


def test_searched_schedules_get_their_costs():
    plan = msgspec.structs.replace(even_plan(micro_batches=4), schedule="zb-auto")
    assert simulated_step(plan).bubble < 0.5


def test_stages_without_flops_can_be_drawn():
    plan = even_plan()
    stages = tuple(msgspec.structs.replace(stage, flops=0.0) for stage in plan.stages)
    plan = msgspec.structs.replace(plan, stages=stages)
    step = simulated_step(plan)
    assert step.length == 0.0
    assert "Ranks wait 0.0 % of the time" in render_html(plan, None, step)


def test_steps_too_large_to_be_played_are_refused():
    with pytest.raises(ScheduleError, match="too large to be drawn"):
        simulated_step(
            msgspec.structs.replace(even_plan(), num_micro_batches=6000, batch_size=6000)
        )


def test_unknown_schedules_are_refused():
    with pytest.raises(ScheduleError, match="mine"):
        simulated_step(msgspec.structs.replace(even_plan(), schedule="mine"))


def test_neither_tensorflow_nor_matplotlib_is_loaded():
    code = (
        "import sys, tarantella_pp.partition.visualization.step_rows; "
        "sys.exit(not {'tensorflow', 'keras', 'mpi4py', 'matplotlib'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
