"""The drawing of stages, their operations and what is sent between them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.plan.page_graph import (
    MOST_BOXES,
    TITLE_CHARACTERS,
    graph_drawing,
    shorten,
)
from tests.helpers.pictured import graphs, plan_of


@settings(max_examples=40, deadline=None)
@given(graphs(names=st.text(min_size=1)), st.integers(1, 5))
def test_all_operations_and_cuts_are_drawn(graph, stages):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    drawn = graph_drawing(plan)
    boxes = [box for column in drawn["columns"] for box in column["boxes"]]
    assert all(0 < len(box["title"]) <= TITLE_CHARACTERS for box in boxes)
    if len(graph.nodes) <= MOST_BOXES:
        assert len(boxes) == len(graph.nodes)
    lines = sum(route["hover"].count(": stage ") for route in drawn["routes"])
    assert lines >= len(plan.cuts)
    assert shorten("abcdefghij", 7) == "ab…ghij"
