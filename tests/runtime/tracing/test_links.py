"""Links as they are measured."""

from __future__ import annotations

import time

import pytest

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.tracing import links


class Link(Communicator):
    """A link to itself that takes its time."""

    size = 2

    def __init__(self, bandwidth, latency):
        self.now, self._bandwidth, self._latency = 0.0, bandwidth, latency

    def post_receive(self, specs, source, tag, *, label=""):
        return self

    def send(self, arrays, dest, tag, *, label=""):
        self._nbytes = arrays[0].nbytes

    def wait(self):
        self.now += self._latency + self._nbytes / self._bandwidth


@pytest.mark.parametrize(
    ("bandwidth", "latency", "found"),
    [(1.2e8, 4e-3, 4e-3), (4e9, 0.0, 0.0), (1e12, 0.01, 0.009)],
)
def test_latency_and_bandwidth_are_told_apart(bandwidth, latency, found, monkeypatch):
    link = Link(bandwidth, latency)
    monkeypatch.setattr(time, "perf_counter", lambda: link.now)
    measured, waited = links.measure_link(link)
    assert waited == pytest.approx(found, abs=1e-6)
    large = links.LARGE
    assert waited + large / measured == pytest.approx(latency + large / bandwidth)


def test_of_a_measured_speed_its_magnitude_counts():
    assert {links.magnitude(speed) for speed in (0.8e8, 1.2e8, 2.9e8)} == {1e8}
    assert links.magnitude(1.1e9) == 1e9
