"""The schedule of a step, whatever the loss asks for."""

from types import SimpleNamespace

from tarantella_pp.runtime.step_schedules import StepSchedules
from tarantella_pp.schedule import ScheduleSpec


def test_a_loss_of_the_whole_batch_leaves_stages_on_their_ranks():
    spec = ScheduleSpec.of("v-half", 6, 3)
    plan = SimpleNamespace(schedule_spec=lambda size: spec)
    groups = SimpleNamespace(pipeline=SimpleNamespace(size=3))
    placed = SimpleNamespace(plan=plan, groups=groups, own_micro_batches=4)
    schedules = StepSchedules(placed, links=[], buckets=(0,) * 6, free=True)
    whole = schedules.training(4, "the loss compares samples")
    assert (whole.name, whole.placement) == ("gpipe", schedules.training(4, None).placement)
