"""What is said of a machine after its probes have run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tarantella_pp.cli.doctor.compute_probes import Stack, layer_seconds, slowest


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


def test_the_slowest_rank_counts() -> None:
    one = {"seconds": 2.0, "flops_per_second": 2.0, "layers": {"a": {"forward": [3.0]}}}
    two = {"seconds": 1.0, "flops_per_second": 1.0, "layers": {"a": {"forward": [4.0]}}}
    expected = {"flops_per_second": 2.0, "layers": {"a": {"forward": [3.0]}}}
    assert slowest([one, two]) == slowest([two, one]) == expected
