from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.graph.units import format_flops, format_seconds
from tarantella_pp.partition.plan.page_graph import (
    BOX_HEIGHT,
    BOX_WIDTH,
    LABEL_HEIGHT,
    LABEL_WIDTH,
    MOST_BOXES,
    lay_out,
    middle,
    outline,
)
from tarantella_pp.partition.plan.page_pictures import (
    NOTE_CHARACTERS,
    TITLE_CHARACTERS,
    fold,
    shorten,
    title,
)
from tests.helpers.pictured import (
    graphs,
    plan_of,
    residual_graph,
)

TOUCH = 0.5


def rectangles(shown, layout):
    for stage, boxes in enumerate(shown.columns):
        for row in range(len(boxes)):
            top = middle(layout.top, row) - BOX_HEIGHT / 2
            left = layout.columns[stage][2]
            yield (left, top, left + BOX_WIDTH, top + BOX_HEIGHT)


def labels(shown, layout):
    for cut in shown.cuts:
        left, width, _ = layout.columns[cut.source[0]]
        x, y = left + width + 6, middle(layout.top, cut.source[1])
        yield (x, y - LABEL_HEIGHT / 2, x + LABEL_WIDTH, y + LABEL_HEIGHT / 2)


def lines(points):
    for (x, y), (u, v) in itertools.pairwise(points):
        yield (min(x, u), min(y, v), max(x, u), max(y, v))


def meet(a, b):
    return (
        a[0] < b[2] - TOUCH and b[0] < a[2] - TOUCH and a[1] < b[3] - TOUCH and b[1] < a[3] - TOUCH
    )


def upright(points):
    return [line for line in lines(points) if line[0] == line[2] and line[3] - line[1] > 2 * TOUCH]


@settings(max_examples=150, deadline=None)
@given(graphs(), st.integers(1, 6), st.booleans())
def test_nothing_overlaps_and_nothing_is_cut_off(graph, stages, with_graph):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    shown = outline(plan, graph if with_graph else None)
    layout = lay_out(shown)
    boxes = [*rectangles(shown, layout), *labels(shown, layout)]
    for a, b in itertools.combinations(boxes, 2):
        assert not meet(a, b)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= layout.width
        assert 0 <= top < bottom <= layout.height
    owned = [*rectangles(shown, layout)]
    paths = [path for paths in layout.routes for path in paths]
    for path in [*paths, *itertools.chain(*layout.links)]:
        for x, y, u, v in lines(path):
            assert 0 <= x <= u <= layout.width
            assert 0 <= y <= v <= layout.height
            assert not any(meet((x, y, u, v), box) for box in owned)


@settings(max_examples=150, deadline=None)
@given(graphs(), st.integers(2, 6))
def test_cuts_do_not_run_on_each_other(graph, stages):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    layout = lay_out(outline(plan, graph))
    for one, other in itertools.combinations(layout.routes, 2):
        first = [line for path in one for line in upright(path)]
        second = [line for path in other for line in upright(path)]
        for a, b in itertools.product(first, second):
            assert a[0] != b[0] or a[3] <= b[1] + TOUCH or b[3] <= a[1] + TOUCH


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(1, 5))
def test_every_edge_is_drawn(graph, stages):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    shown = outline(plan, graph)
    crossing = {e for e in graph.digraph.edges if plan.assignment[e[0]] != plan.assignment[e[1]]}
    drawn = {(cut.source[0], place[0]) for cut in shown.cuts for place in cut.targets}
    assert {(plan.assignment[a], plan.assignment[b]) for a, b in crossing} <= drawn
    assert sum(len(cut.tensors) for cut in shown.cuts) == len(plan.cuts)
    if len(graph.nodes) <= MOST_BOXES:
        inner = sum(len(own) for own in shown.links)
        ends = len({plan.assignment[i] for i in graph.tensors[0].consumers})
        assert inner >= len(graph.digraph.edges) - len(crossing) + ends


@given(
    st.lists(st.text("ab_1/", min_size=1, max_size=40), min_size=1, max_size=300),
    st.integers(1, 30),
)
def test_runs_cover_all_in_order_and_their_titles_fit(names, most):
    runs = fold(names, [1] * len(names), most)
    assert [i for run in runs for i in run] == list(range(len(names)))
    assert len(runs) <= most
    for run in runs:
        assert 0 < len(title(names, run, TITLE_CHARACTERS)) <= TITLE_CHARACTERS


def test_runs_are_blocks_where_the_model_has_some():
    graph = residual_graph(200)
    shown = outline(plan_of(graph, 2), graph)
    assert [box.title for box in shown.columns[0][1:4]] == ["block0 …", "block1 …", "block2 …"]
    names = [f"layer_{i:04}" for i in range(20)]
    assert title(names, range(4, 9), TITLE_CHARACTERS) == "layer_0004 …"


@given(graphs(names=st.text(min_size=1)), st.integers(1, 4))
def test_texts_fit_their_boxes(graph, stages):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    for known in (graph, None):
        for box in itertools.chain(*outline(plan, known).columns):
            assert len(box.title) <= TITLE_CHARACTERS
            assert len(box.note) <= NOTE_CHARACTERS


def test_words():
    assert shorten("abcdefghij", 7) == "ab…ghij"
    assert [format_flops(v) for v in (0, 999, 1500, 3.87e9)] == [
        *("0 FLOP", "999 FLOP", "1.5 kFLOP", "3.87 GFLOP")
    ]
    assert [format_seconds(v) for v in (0, 2e-6, 0.0125, 3)] == ["0 s", "2 us", "12.5 ms", "3 s"]
