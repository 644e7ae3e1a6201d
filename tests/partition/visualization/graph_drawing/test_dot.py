from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.visualization import render_dot
from tarantella_pp.partition.visualization.graph_drawing.dot import quote
from tests.helpers.pictured import (
    graphs,
    plan_of,
    small,
)

TOKEN = re.compile(r'\s+|"(?:[^"\\\n]|\\.)*"|->|[{}\[\]=;,]|[A-Za-z_]\w*|-?\d+(?:\.\d+)?')


def tokens(text):
    """Reads DOT; fails where the language does not know what follows."""
    at, found = 0, []
    while at < len(text):
        match = TOKEN.match(text, at)
        assert match, text[at : at + 40]
        at = match.end()
        if not match[0].isspace():
            found.append(match[0])
    return found


def test_stages_are_clusters_and_cut_edges_carry_their_bytes():
    graph, plan = small()
    text = render_dot(plan, graph)
    for stage in range(plan.num_stages):
        assert f"subgraph cluster_{stage} {{" in text
    assert text.count(format_bytes(plan.cuts[0].bytes)) == sum(len(c.targets) for c in plan.cuts)
    edges = set(re.findall(r"  n(\d+) -> n(\d+)", text))
    assert edges == {(str(a), str(b)) for a, b in graph.digraph.edges}
    assert "n19 -> outputs" in text


def test_without_a_graph_cuts_lead_to_clusters():
    _, plan = small()
    text = render_dot(plan)
    assert text.count("lhead=cluster_") == sum(len(cut.targets) for cut in plan.cuts)


@settings(max_examples=60)
@given(graphs(names=st.text(min_size=1), most=6), st.text())
def test_any_name_leaves_it_balanced(graph, model):
    plan = plan_of(graph, 2, model=model)
    for known in (graph, None):
        depth = 0
        for token in tokens(render_dot(plan, known)):
            depth += {"{": 1, "}": -1, "[": 1, "]": -1}.get(token, 0)
            assert depth >= 0
        assert depth == 0


def test_strings_are_quoted():
    assert quote('a"b\\N\nc\x00') == '"a\\"b\\\\N\\nc "'


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
def test_graphviz_reads_it():
    graph, plan = small(model='}"\\')
    done = subprocess.run(
        ["dot", "-Tplain"],
        input=render_dot(plan, graph),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
