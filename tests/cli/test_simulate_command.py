"""`tarantella simulate`: figures that can be worked out by hand."""

import pytest
from msgspec.structs import replace

from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tests.helpers.commands import GRAPH
from tests.helpers.plans import chain_graph, plan_of

FLOPS = 128.0  # forward, per sample and layer
SAMPLES, MICRO_BATCHES, STAGES = 32, 4, 4


@pytest.fixture
def plan(tmp_path):
    """Four equal stages of one layer each."""
    path = tmp_path / "plan.json"
    plan_of(chain_graph(STAGES), [0, 1, 2, 3]).save(path)
    return path


@pytest.fixture
def machine(tmp_path):
    """A machine of 1 GFLOP/s, whose links cost nothing."""
    path = tmp_path / "machine.json"
    HardwareSpec(1e9, bandwidth=None, latency=0.0).save(path)
    return "--machine", path


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_have_the_bubble_of_the_formula(command, plan, machine, schedule) -> None:
    found = command.json("simulate", plan, *machine, "--schedule", schedule)
    slots = MICRO_BATCHES + STAGES - 1
    forward = SAMPLES / MICRO_BATCHES * FLOPS / 1e9
    assert found["pipeline_seconds"] == pytest.approx(slots * 3 * forward, rel=1e-6)
    assert found["step_seconds"] == found["pipeline_seconds"]
    assert found["bubble"] == pytest.approx((STAGES - 1) / slots, rel=1e-6)
    assert found["samples_per_second"] == pytest.approx(SAMPLES / found["step_seconds"])
    assert found["speed_up"] == pytest.approx(STAGES * MICRO_BATCHES / slots, rel=1e-6)
    assert found["num_ranks"] == STAGES


@pytest.mark.parametrize("measured", [[0, 1, 2, 3], [1]])
def test_measured_seconds_take_the_place_of_arithmetic(
    command, tmp_path, machine, measured
) -> None:
    whole = plan_of(chain_graph(STAGES), [0, 1, 2, 3])
    stages = [
        replace(stage, forward_seconds=0.01, backward_seconds=0.03) if i in measured else stage
        for i, stage in enumerate(whole.stages)
    ]
    path = tmp_path / "plan.json"
    replace(whole, stages=tuple(stages)).save(path)
    found = command.json("simulate", path, *machine)
    busy = [rank["busy_seconds"] for rank in found["ranks"]]
    arithmetic = 3 * SAMPLES * FLOPS / 1e9
    for stage, seconds in enumerate(busy):
        wanted = MICRO_BATCHES * 0.04 if stage in measured else arithmetic
        assert seconds == pytest.approx(wanted, rel=1e-9)
    half = command.json("simulate", path, *machine, "--micro-batches", 2 * MICRO_BATCHES)
    assert half["ranks"][1]["busy_seconds"] == pytest.approx(busy[1], rel=1e-9)
    text = " ".join(found["assumptions"])
    assert ("stages 1 take" if len(measured) == 1 else "stages 0, 1, 2, 3 take") in text
    assert ("TFLOP/s" in text) == (len(measured) < STAGES)


def test_the_curve_goes_from_2_to_4096_ranks(command, plan, machine) -> None:
    HardwareSpec(1e9).save(machine[1])
    curve = command.json("simulate", plan, *machine)["scaling"]
    assert [point["num_ranks"] for point in curve] == [2**k for k in range(1, 13)]
    assert [point["num_replicas"] for point in curve] == [1, 1, *(2**k for k in range(1, 11))]
    for point in curve:
        assert 0 < point["efficiency"] <= 1
    rates = [point["samples_per_second"] for point in curve]
    assert rates == sorted(rates)
    efficiency = [point["efficiency"] for point in curve[1:]]
    assert efficiency == sorted(efficiency, reverse=True)


def test_options_reach_the_simulation(command, plan, machine) -> None:
    found = command.json("simulate", plan, *machine, "--ranks", 2, "--schedule", "interleaved")
    # (p - 1) / (v m + p - 1) for two stages on each of two ranks.
    assert found["bubble"] == pytest.approx(1 / 9, rel=1e-6)
    assert len(found["ranks"]) == 2
    HardwareSpec(1e9, latency=1e-3).save(machine[1])
    slow = (*machine, "--link-bandwidth", "1kB")
    found = command.json("simulate", plan, *slow, "--micro-batches", 1, "--replicas", 4)
    # 32 samples of 32 bytes over three links there and back, and the compute of one micro-batch.
    messages = 6 * (32 * 32 / 1000 + 1e-3)
    compute = STAGES * 3 * SAMPLES * FLOPS / 1e9
    assert found["pipeline_seconds"] == pytest.approx(messages + compute, rel=1e-9)
    assert found["bubble_without_messages"] == pytest.approx(3 / 4, rel=1e-9)
    # The first stage is done last, so its sum over the replicas, in a ring, is not hidden.
    ring = 2 * 3 * (8 * 8 * 4 / 4 / 1000 + 1e-3)
    assert found["step_seconds"] == pytest.approx(messages + compute + ring, rel=1e-9)
    assert (found["num_ranks"], found["samples"]) == (16, 4 * SAMPLES)


def test_tables(command, plan) -> None:
    assert command("simulate", plan, "--replicas", 2, "--timeline") == 0
    assert command.stderr == ""
    for text in ("on 8 ranks", "2 replicas", "Throughput:", "Bubble:", "4,096", "rank 3 |"):
        assert text in command.stdout
    assert "Assumed: a rank does 1 TFLOP/s" in command.stdout


@pytest.mark.parametrize(
    ("code", "arguments", "complaint"),
    [
        (2, ["missing.json"], "There is no file"),
        (2, [GRAPH], "no valid plan"),
        (2, ["PLAN", "--schedule", "fastest"], "schedule='fastest'"),
        (2, ["PLAN", "--ranks", "3"], "num_ranks=3"),
        (2, ["PLAN", "--micro-batches", "33"], "32. Received: --micro-batches=33"),
        (2, ["PLAN", "--schedule", "forward"], "forward"),
        (2, ["PLAN", "--link-bandwidth", "fast"], "--link-bandwidth='fast'"),
    ],
)
def test_mistakes_are_told_in_one_line(command, plan, code, arguments, complaint) -> None:
    arguments = [plan if argument == "PLAN" else argument for argument in arguments]
    assert complaint in command.fails(code, "simulate", *arguments)
