"""Traces and the callback, on simulated records and on real training."""

import dataclasses
import itertools
import json
import os
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tarantella_pp as tnt
from tarantella_pp.callbacks.timeline import (
    COMMUNICATION,
    COMPUTE,
    STEPS,
    trace_events,
    write_trace,
)
from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.runtime.executor import LOGS, UPDATE, RecordedStep, Span
from tarantella_pp.schedule import Costs, LinkCosts, StageCosts, lower, make_schedule, simulate
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run

SCHEDULES = {"gpipe": 3, "1f1b": 3, "interleaved": 6, "zb-h1": 3, "zb-v": 6, "forward": 3}
ZERO = 1e5  # when recording began on the clock of the records: not at 0


def played(name, costs=None, micro_batches=5):
    schedule = lower(make_schedule(name, SCHEDULES[name], micro_batches, 3))
    costs = costs or Costs.uniform(schedule.num_stages, 3.0, 2.0, 1.0, LinkCosts(0.0, 0.5))
    return schedule, simulate(schedule, costs)


def recorded(name, costs=None, steps=2):
    """What would be recorded if the ranks did what the simulator says."""
    schedule, timeline = played(name, costs)
    found = []
    for number in range(steps):
        zero = ZERO + number * (timeline.step_seconds + 7.0)
        ends, spans = [], []
        for own in timeline.events:
            mine = [Span(event.action, zero + event.start, zero + event.end) for event in own]
            mine.append(Span(UPDATE, mine[-1].end, mine[-1].end + 1.0))
            mine.append(Span(LOGS, mine[-1].end, mine[-1].end + 0.5))
            spans.append(tuple(mine))
            ends.append((zero - 0.5, mine[-1].end + 0.25))
        found.append(RecordedStep(number, schedule, 32, tuple(ends), tuple(spans)))
    return found


def track_of(event):
    """Which track of its process an event is on; numbers of tracks are those of one process."""
    track = event["tid"] - 10 * event["pid"]
    assert track in (COMPUTE, COMMUNICATION, STEPS)
    assert event["tid"] not in (0, event["pid"])
    return track


def check_trace(events):
    """Checks what holds for every trace; returns its processes' names by number."""
    slices, arrows, names = defaultdict(list), defaultdict(dict), {}
    for event in events:
        track = (event["pid"], track_of(event))
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start, length = (round(1000 * event[field]) for field in ("ts", "dur"))  # as Perfetto
            slices[track].append((start, start + length, event["name"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]], "an arrow has one beginning and one end"
            arrows[event["id"]][event["ph"]] = (track, round(1000 * event["ts"]))
        elif event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
    for track, own in slices.items():
        own.sort()
        for (_, end, name), (start, _, after) in itertools.pairwise(own):
            assert end <= start, f"{name} and {after} overlap on track {track}"
    transfers = [s for track, own in slices.items() if track[1] == COMMUNICATION for s in own]
    ends = {
        kind: sum(name.startswith(kind) for _, _, name in transfers) for kind in ("send", "receive")
    }
    assert ends["send"] == ends["receive"] == len(arrows)
    for ends in arrows.values():
        (sender, sent), (receiver, arrived) = ends["s"], ends["f"]
        assert sender != receiver
        assert sent <= arrived, "an arrow does not go back in time"
        begins = [n for a, b, n in slices[sender] if a <= sent <= b]
        arrives = [n for a, b, n in slices[receiver] if a <= arrived <= b]
        message = next(n for n in begins if n.startswith("send")).removeprefix("send")
        assert f"receive{message}" in arrives
    return names


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_has_no_overlaps_and_an_arrow_for_each_message(name, tmp_path):
    steps = recorded(name)
    write_trace(tmp_path / "trace.json", steps)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert check_trace(events) == {rank: f"rank {rank}" for rank in range(3)}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 0.1), min_size=2, max_size=30))
def test_slices_that_touch_do_not_overlap_by_rounding(lengths):
    (step,) = recorded("gpipe", steps=1)
    ends = [ZERO, *itertools.accumulate(lengths, initial=ZERO)]
    spans = tuple(Span(UPDATE, a, b) for a, b in itertools.pairwise(ends))
    touching = dataclasses.replace(step, spans=(spans,), bounds=((ZERO, ends[-1]),))
    check_trace(trace_events([touching]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_timeline_of_a_step_is_found_again(name):
    stages = tuple(
        StageCosts(1.0 + s, 2.0 + s, 1.5, full_backward=3.0 + s) for s in range(SCHEDULES[name])
    )
    costs = Costs(stages, {}, LinkCosts(0.0, 0.25), send_seconds=0.125, receive_seconds=0.0625)
    steps, (_, timeline) = recorded(name, costs), played(name, costs)
    for field in ("step_seconds", "bubble_fraction", "busy_seconds"):
        assert getattr(steps[1].timeline, field) == pytest.approx(getattr(timeline, field))


def small_model(stages):
    import keras

    stack = [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
    model = tnt.PipelineModel(keras.Sequential(stack), stages, 4, balance="flops")
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(32, 4))  # four batches of 8
    return model, x, x[:, :2]


def fit_traced():
    """Runs on every rank of a job with `--trace`: two trainings, then one that differs."""
    model, x, y = small_model(2)
    logs = []
    for _ in range(2):
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
        logs.append({name: values[-1] for name, values in history.history.items()})
    del os.environ["TNT_TRACE"]
    mine = [tnt.callbacks.Timeline()] if tnt.get_rank() == 0 else []
    return logs, error_of(lambda: model.fit(x, y, batch_size=8, verbose=0, callbacks=mine))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.keras
def test_two_ranks_write_one_trace_for_each_training(tmp_path):
    env = {"TNT_TRACE": f"{tmp_path}/new/trace.json"}
    run = mpi_run(2, fit_traced, timeout=120, env=env).check()
    [(logs, message), (same, _)] = run.results
    assert logs == same
    for own in logs:
        assert own["bubble"] + own["busy"] == pytest.approx(1.0)
        assert 0 < own["busy"] < 1
        assert 0 < own["wait"] < own["bubble"]
    files = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in files] == ["trace-2.json", "trace.json"]
    for path in files:
        events = json.loads(path.read_text())["traceEvents"]
        assert len(check_trace(events)) == 2
        steps = {e["name"] for e in events if e["ph"] == "X" and track_of(e) == STEPS}
        assert steps == {f"step {i}" for i in range(8)}, "validation is no training step"
        computed = {e["name"] for e in events if e["ph"] == "X" and track_of(e) == COMPUTE}
        assert {"0F3", "1BW0", "update"} <= computed
    assert "fit(callbacks=['Timeline'])" in message
    assert "fit(callbacks=[])" in message


@pytest.mark.keras
def test_the_callback_in_one_process(tmp_path, capsys):
    import keras

    model, x, y = small_model(2)
    timeline = tnt.callbacks.Timeline(tmp_path / "trace.json", steps=range(4, 7))
    with pytest.raises(ConfigurationError, match="No steps were recorded"):
        timeline.summary()
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[timeline])
    assert [step.number for step in timeline.steps] == [4, 5, 6]
    assert [step.rows for step in timeline.steps] == [8, 8, 8]
    assert history.history["wait"] == [0.0, 0.0]
    assert history.history["bubble"] == pytest.approx([1 - b for b in history.history["busy"]])
    names = check_trace(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert names == {0: "rank 0"}
    timeline.summary()
    printed = capsys.readouterr().out
    assert "1f1b, 4 micro-batches of a batch of 8" in printed
    assert "Bubble in this: " in printed

    late, before = tmp_path / "late", (tmp_path / "trace.json").read_bytes()
    gone = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: late.rename(tmp_path / "old"))
    with pytest.warns(UserWarning, match="no trace of this training: .*late/t': No such file"):
        model.fit(x, y, verbose=0, callbacks=[tnt.callbacks.Timeline(late / "t"), gone])
    with pytest.raises(FileError, match="Is a directory"):
        model.fit(x, y, verbose=0, callbacks=[tnt.callbacks.Timeline(tmp_path)])
    fails = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[timeline, fails])
    assert (tmp_path / "trace.json").read_bytes() == before
    model.fit(x, y, batch_size=8, verbose=0)
    assert timeline.steps == (), "training without the callback is not recorded"
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    plain.compile("sgd", "mse")
    with pytest.raises(ConfigurationError, match=r"tnt\.PipelineModel.*class Sequential"):
        plain.fit(x, y, verbose=0, callbacks=[timeline])
