"""What is said of a machine after its probes have run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tarantella_pp.cli.doctor.compute_probes import (
    ComputeProbes,
    Stack,
    layer_seconds,
    ranks_per_core,
    slowest,
)


def stack(layers: int, flops: float, weight_bytes: float) -> Stack:
    model = SimpleNamespace(layers=[None] * layers)
    return Stack(model, lambda: None, lambda: None, flops, weight_bytes)


def test_what_layers_need_is_told_apart() -> None:
    """Two layers each, that take 1 s to start, 0.5 s for a FLOP and 0.25 s for a byte."""
    stacks = {"small": stack(16, 0.0, 0.0), "large": stack(2, 20.0, 4.0), "wide": stack(2, 4.0, 40)}
    taken = {"small": 16.0, "large": 2 + 10 + 1.0, "wide": 2 + 2 + 10.0}
    assert layer_seconds(stacks, taken) == pytest.approx((1.0, 0.5, 0.25))
    del stacks["wide"]
    assert layer_seconds(stacks, taken) == pytest.approx((1.0, 11 / 20, 0.0))


def test_noise_is_no_speed_below_zero() -> None:
    stacks = {"small": stack(16, 0.0, 0.0), "large": stack(2, 20.0, 4.0), "wide": stack(2, 4.0, 40)}
    assert layer_seconds(stacks, {"small": -0.1, "large": 10.0, "wide": 1.0}) == (0.0, 0.5, 0.0)
    assert layer_seconds(stacks, {"small": 0.0, "large": -1.0, "wide": 1.0})[1] == 0.0


def test_ranks_are_counted_for_the_cores_of_their_host() -> None:
    shared = [["a", 0, 1], ["b", 5], ["a", 0, 1], ["a", 0, 1]]
    assert [ranks_per_core(shared, rank) for rank in range(4)] == [1.5, 1.0, 1.5, 1.5]
    assert ranks_per_core([["a", 0], ["a", 1]], 1) == 1.0  # bound to a core each
    assert ranks_per_core([["a", 0, 1, 2, 3], ["a", 0, 1, 2, 3]], 0) == 0.5


@pytest.mark.parametrize(("ranks", "expected"), [(0.5, 6.0), (1.0, 6.0), (1.5, 3.0)])
def test_where_ranks_share_cores_the_time_of_the_processor_counts(
    ranks: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe of 2 s, during which another rank runs for 4."""
    monkeypatch.setattr("time.perf_counter", iter((1.0, 7.0)).__next__)
    monkeypatch.setattr("time.process_time", iter((1.0, 3.0)).__next__)
    probes = object.__new__(ComputeProbes)
    probes._calls, probes._measures, probes._on_gpu = {"product": lambda: None}, True, False
    probes._share_cores(ranks)
    assert probes._round() == [expected]


def test_the_slowest_rank_counts() -> None:
    one = {"seconds": 2.0, "flops_per_second": 2.0, "layers": {"a": {"forward": [3.0]}}}
    two = {"seconds": 1.0, "flops_per_second": 1.0, "layers": {"a": {"forward": [4.0]}}}
    expected = {"flops_per_second": 2.0, "layers": {"a": {"forward": [3.0]}}}
    assert slowest([one, two]) == slowest([two, one]) == expected
