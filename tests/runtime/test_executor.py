import time

import pytest

from benchmarks.runtime.stubs import Seconds, StubPipeline
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm import machine as links
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.executor import UPDATE, Recorder, Span, alike, gather_steps
from tarantella_pp.schedule import Compute, Transfer, make_schedule
from tests.helpers.mpi import mpi_run

SCHEDULES = {"gpipe": 3, "1f1b": 3, "interleaved": 6, "zb-h1": 3, "zb-v": 6, "forward": 3}
AHEAD = 1000.0
"""Seconds that the clock of rank 1 is set ahead."""


class Clock:
    """Stands in for the module `time`, on a host whose clock is ahead."""

    @staticmethod
    def perf_counter():
        return time.perf_counter() + AHEAD * world().rank


def record_all():
    """Runs on every rank: two steps of each schedule, recorded, and one that is not."""
    ranks, found = world(), {}
    for name, stages in SCHEDULES.items():
        recorder = Recorder(2)
        pipeline = StubPipeline(name, stages, 5, Seconds(), ranks, recorder=recorder)
        finished = [pipeline.step().finished for _ in range(2)]
        plain = StubPipeline(name, stages, 5, Seconds(), ranks).step().finished
        steps = gather_steps(recorder.steps, links.clock_offset(ranks), ranks)
        found[name] = {
            "finished": [*finished, plain],
            "programs": [[str(a) for a in own] for own in pipeline.schedule.actions],
            "steps": [
                [[[str(s.what), s.start, s.end] for s in own] for own in step.spans]
                for step in steps
            ],
            "numbers": [step.number for step in steps],
        }
    same = links.clock_offset(ranks)
    links.time = Clock
    return found, same, links.clock_offset(ranks)


@pytest.mark.mpi
def test_every_action_is_recorded_once_and_in_order_on_one_clock_and_changes_nothing():
    results = mpi_run(3, record_all, timeout=60).check().results
    for name in SCHEDULES:
        check_records([found[name] for found, _, _ in results])
    assert [same for _, same, _ in results] == [0.0, 0.0, 0.0]
    offsets = [offset for _, _, offset in results]
    assert offsets == pytest.approx([0.0, -AHEAD, -2 * AHEAD], abs=1.0)


def check_records(ranks):
    assert ranks[0]["numbers"] == [0, 1]
    assert ranks[0]["steps"] == ranks[1]["steps"] == ranks[2]["steps"]
    for step in ranks[0]["steps"]:
        for program, spans in zip(ranks[0]["programs"], step, strict=True):
            names = [what for what, _, _ in spans]
            assert sorted(names) == sorted(program)
            assert [n for n in names if ">" not in n] == [n for n in program if ">" not in n]
            edges = [moment for _, start, end in spans for moment in (start, end)]
            assert edges == sorted(edges)  # a rank does one thing at a time
    for rank in ranks:
        assert rank["finished"][0] == rank["finished"][1] == rank["finished"][2]
    assert sum(len(rank["finished"][0]) for rank in ranks) == 5


def run_steps(recorder, count):
    schedule = make_schedule("1f1b", 1, 2)
    for _ in range(count):
        with recorder.step(schedule, 8):
            recorder.spans.append(Span(Compute(0, "F", 0), 0.0, 0.5))
            recorder.spans.append(Span(Transfer(0, 1, "R", "F", 0), 0.5, 0.75))
            with recorder.span(UPDATE):
                pass


@pytest.mark.parametrize(
    ("steps", "kept"), [(2, [3, 4]), (9, [0, 1, 2, 3, 4]), (range(1, 3), [1, 2]), (range(7, 9), [])]
)
def test_the_wanted_steps_are_kept(steps, kept):
    recorder = Recorder(steps)
    run_steps(recorder, 5)
    assert [step.number for step in recorder.steps] == kept


@pytest.mark.parametrize("steps", [0, True, "all", range(3, 3), range(-2, 2)])
def test_steps_that_name_no_step_are_refused(steps):
    with pytest.raises(ConfigurationError, match=r"how many of the last steps.*Received: steps="):
        Recorder(steps)


def test_a_step_that_fails_is_not_kept():
    recorder = Recorder(3)
    with pytest.raises(ZeroDivisionError), recorder.step(make_schedule("1f1b", 1, 2), 8):
        recorder.spans.append(Span(UPDATE, 0.0, 1 / 0))
    run_steps(recorder, 1)
    assert [step.number for step in recorder.steps] == [0]
    assert len(recorder.steps[0].spans[0]) == 3


def test_shares_are_of_the_time_from_step_to_step(monkeypatch):
    recorder = Recorder(1)
    # Two readings at the bounds of each of three steps, two around the update: a step begins
    # every 2 seconds and takes 1.
    clocks = iter([0.0, 0.9, 0.9, 1.0, 2.0, 2.9, 2.9, 3.0, 4.0, 4.9, 4.9, 5.0])
    monkeypatch.setattr("tarantella_pp.runtime.executor.time.perf_counter", lambda: next(clocks))
    run_steps(recorder, 3)
    assert recorder.take_shares() == pytest.approx((0.25, 0.125))
    assert recorder.take_shares() == (0.0, 0.0)


def test_steps_alike_have_the_schedule_and_batch_size_of_most():
    recorder = Recorder(9)
    first, other = make_schedule("1f1b", 1, 2), make_schedule("1f1b", 1, 3)
    for schedule, rows in ((first, 8), (first, 8), (first, 6), (other, 8)):
        with recorder.step(schedule, rows):
            pass
    steps = gather_steps(recorder.steps, 0.0, Communicator())
    assert [step.number for step in alike(steps)] == [0, 1]
    assert alike([]) == []
