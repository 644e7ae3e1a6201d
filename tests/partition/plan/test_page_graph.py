from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.plan.page_graph import (
    MOST_BOXES,
    NOTE_CHARACTERS,
    TITLE_CHARACTERS,
    graph_drawing,
    outline,
    shorten,
)
from tests.helpers.pictured import graphs, plan_of, residual_graph


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(1, 5))
def test_every_edge_is_drawn(graph, stages):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    shown = outline(plan, graph)
    crossing = {e for e in graph.edges if plan.assignment[e[0]] != plan.assignment[e[1]]}
    drawn = {(source[0], place[0]) for source, cut in shown.cuts.items() for place in cut.targets}
    assert {(plan.assignment[a], plan.assignment[b]) for a, b in crossing} <= drawn
    assert sum(len(cut.tensors) for cut in shown.cuts.values()) == len(plan.cuts)
    if len(graph.nodes) <= MOST_BOXES:
        inner = sum(len(own) for own in shown.links)
        ends = len({plan.assignment[i] for i in graph.tensors[0].consumers})
        assert inner >= len(graph.edges) - len(crossing) + ends


@settings(max_examples=30, deadline=None)
@given(graphs(names=st.text(min_size=1)), st.integers(1, 4))
def test_texts_fit_their_boxes(graph, stages):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    for known in (graph, None):
        for box in itertools.chain(*outline(plan, known).columns):
            assert 0 < len(box.title) <= TITLE_CHARACTERS
            assert len(box.note) <= NOTE_CHARACTERS
    assert shorten("abcdefghij", 7) == "ab…ghij"


def test_many_operations_share_boxes_and_skips_run_above_the_columns():
    graph = residual_graph(300, long_skips=4)
    plan = plan_of(graph, 3)
    shown, drawn = outline(plan, graph), graph_drawing(plan, graph)
    assert all(len(boxes) <= MOST_BOXES + 1 for boxes in shown.columns)
    assert shown.columns[1][0].title == "block20_0_conv2d …"
    assert shown.columns[1][0].note == "5 ops · Conv2D"
    assert shown.columns[1][0].hover.count("\n") == 7  # kind, weights, FLOPs and all names
    assert drawn["top"] > graph_drawing(plan_of(residual_graph(10), 2), None)["top"]
    assert drawn["height"] < 1500
    for column in drawn["columns"]:
        assert column["x"] + column["width"] <= drawn["width"]
        assert drawn["top"] + column["height"] <= drawn["height"]
