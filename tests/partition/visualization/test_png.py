from __future__ import annotations

import importlib.util
import struct
import sys

import pytest

from tarantella_pp.errors import ConfigurationError, MissingDependencyError
from tarantella_pp.partition.visualization import save_png
from tarantella_pp.partition.visualization.step_rows import simulated_step
from tests.helpers.pictured import (
    plan_of,
    residual_graph,
    small,
)

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


def size(path):
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:24])


@needs_matplotlib
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["timeline", "memory", "graph", "sheet"])
def test_png_is_written(tmp_path, kind):
    graph, plan = small(model="costs $5 \\frac{ 層 </b>")
    save_png(tmp_path / "a.png", plan, kind, graph=graph, timeline=simulated_step(plan))
    width, height = size(tmp_path / "a.png")
    assert width >= 1500
    assert height >= 300


@pytest.mark.slow
@needs_matplotlib
def test_many_stages_stay_within_bounds(tmp_path):
    plan = plan_of(residual_graph(128), 128, micro_batches=4, limit="1GiB")
    save_png(tmp_path / "a.png", plan, timeline=simulated_step(plan))
    assert max(size(tmp_path / "a.png")) <= 9000


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    _, plan = small()
    with pytest.raises(ConfigurationError, match="kind='pie'"):
        save_png(tmp_path / "a.png", plan, "pie")
    with pytest.raises(ConfigurationError, match="timeline=None"):
        save_png(tmp_path / "a.png", plan)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        save_png(tmp_path / "a.png", plan, "memory")
