from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import msgspec
import pytest

from tarantella_pp.cli.io import plan_pictures
from tarantella_pp.errors import ConfigurationError
from tests.helpers.pictured import small


def arguments(*given):
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    plan_pictures.add_arguments(parser)
    return parser.parse_args(["plan.json", *given])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_written_where_they_are_asked_for(tmp_path):
    graph, plan = small()
    given = [f"--{kind}={tmp_path / 'a'}.{kind}" for kind in ("html", "svg", "dot")]
    written = plan_pictures.write(plan, graph, arguments(*given))
    assert sorted(path.name for path in written) == ["a.dot", "a.html", "a.svg"]
    for path in written:
        assert path.stat().st_size > 1000
    assert "Timeline of 4 ranks" in (tmp_path / "a.html").read_text()


def test_folders_get_one_file_for_each_picture(tmp_path):
    graph, plan = small(model="../odd name/é")
    plan_pictures.write(plan, graph, arguments(f"--svg={tmp_path}", f"--html={tmp_path}/"))
    stem = "odd_name_é"
    assert names(tmp_path) == [
        *(f"{stem}-graph.svg", f"{stem}-memory.svg", f"{stem}-timeline.svg", f"{stem}.html")
    ]


def test_files_are_named_after_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph, plan = small()
    assert plan_pictures.write(plan, None, arguments("--dot", "--html")) == [
        Path("net.html"),
        Path("net.dot"),
    ]
    plan_pictures.write(msgspec.structs.replace(plan, model=".."), graph, arguments("--dot"))
    assert names(tmp_path) == ["net.dot", "net.html", "plan.dot"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_png_files(tmp_path):
    _, plan = small()
    plan_pictures.write(plan, None, arguments(f"--png={tmp_path}"))
    plan_pictures.write(plan, None, arguments(f"--png={tmp_path / 'a.png'}"))
    assert names(tmp_path) == ["a.png", "net-graph.png", "net-memory.png", "net-timeline.png"]


def test_schedules_of_others_have_no_timeline(tmp_path):
    _, plan = small(schedule="mine")
    plan_pictures.write(plan, None, arguments(f"--svg={tmp_path}", f"--html={tmp_path}"))
    assert names(tmp_path) == ["net-graph.svg", "net-memory.svg", "net.html"]


def test_nothing_asked_for_is_nothing_written():
    graph, plan = small()
    assert plan_pictures.write(plan, graph, arguments()) == []


def test_mistakes_are_named(tmp_path):
    graph, plan = small()
    victim = tmp_path / "plan.json"
    victim.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"ends in \.svg, or a folder"):
        plan_pictures.write(plan, graph, arguments(f"--svg={victim}"))
    assert victim.read_text() == "{}"
    with pytest.raises(ConfigurationError, match="There is no folder"):
        plan_pictures.check(arguments(f"--html={tmp_path}/none/a.html"))
    with pytest.raises(ConfigurationError, match="There is no folder"):
        plan_pictures.check(arguments(f"--html={tmp_path}/none/"))
    (tmp_path / "a.html").symlink_to(tmp_path / "none" / "b.html")
    with pytest.raises(ConfigurationError, match=f"Cannot write .*{os.sep}a.html"):
        plan_pictures.write(plan, graph, arguments(f"--html={tmp_path / 'a.html'}"))
