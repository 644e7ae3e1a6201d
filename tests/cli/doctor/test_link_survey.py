"""What is wrong with the links between hosts."""

from __future__ import annotations

import math

import pytest

from tarantella_pp.cli.doctor.link_survey import MeasuredLinks
from tarantella_pp.cli.doctor.probe_job import Link, machine_of_ranks
from tarantella_pp.partition.plan.hardware_spec import PassSpeed

FAST, SLOW = Link(20.0, 3.0), Link(90.0, 0.1)
RANK = {
    "flops_per_second": 1e10,
    "memory_bandwidth": 1e9,
    "action_seconds": 1e-4,
    "on_gpu": 0.0,
    "layers": {
        "product": {"forward": [3e-5, 2e-10, 2e-10], "backward": [4e-5, 4e-10, 0.0]},
        "function": {"forward": [1e-5, 2.5e-10, 0.0], "backward": [0.0, 0.0, 0.0]},
    },
}


def test_links_that_are_alike_are_right() -> None:
    assert not list(MeasuredLinks({("a", "b"): FAST, ("a", "c"): Link(50.0, 1.2)}).findings())
    assert not list(MeasuredLinks({("a", "b"): SLOW}).findings())
    assert not list(MeasuredLinks().findings())


def test_a_slow_link_is_named_beside_the_others() -> None:
    links = {("a", "b"): FAST, ("a", "c"): SLOW, ("b", "c"): FAST}
    [finding] = MeasuredLinks(links).findings()
    assert finding.startswith("Messages between a and c are slow, 0.1 GB/s at worst, where half")


def test_dead_links_and_those_not_tried_are_named() -> None:
    links = MeasuredLinks({("a", "b"): FAST}, {("a", "c"): "", ("b", "c"): "why."}, (("c", "d"),))
    dead, unknown = links.findings()
    assert dead.startswith("No messages of MPI pass between a and c, b and c: why. Let ")
    assert unknown.startswith("The time was up before c and d were tried")


def test_a_job_that_fails_behind_its_messages_is_told() -> None:
    [finding] = MeasuredLinks({("a", "b"): FAST}, why="rank 1 did not end.").findings()
    assert finding == "The job that measured the links failed: rank 1 did not end."


def test_the_machine_has_the_slowest_link() -> None:
    machine = machine_of_ranks(RANK, [FAST, Link(10.0, 0.5), SLOW])
    assert (machine.bandwidth, machine.latency) == pytest.approx((0.1e9, 90e-6))
    assert machine.flops_per_second == 1e10
    assert machine.weight_bandwidth == 5e9
    forward, backward = machine.layers["product"].forward, machine.layers["product"].backward
    assert forward == PassSpeed(1 / 2e-10, 3e-5, 1 / 2e-10)
    assert backward == PassSpeed(1 / 4e-10, 4e-5, None)
    assert 1e15 < machine.layers["function"].backward.flops_per_second < math.inf
    gpu = machine_of_ranks(RANK | {"layers": {}, "on_gpu": 1.0}, [FAST])
    assert (gpu.weight_bandwidth, gpu.layers) == (None, {})
