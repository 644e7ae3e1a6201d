from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan import Tie
from tarantella_pp.partition.visualization import (
    Bar,
    StepBars,
    render_html,
    render_svg,
)
from tarantella_pp.partition.visualization.graph_drawing.outline import outline
from tarantella_pp.partition.visualization.step_rows import simulated_step
from tests.helpers.pictured import (
    graph_of,
    graphs,
    plan_of,
    residual_graph,
    small,
)

KINDS = ("timeline", "memory", "graph", "sheet")
SVG = "{http://www.w3.org/2000/svg}"
EVIL = st.text(min_size=1) | st.sampled_from(
    ["<script>alert(1)</script>", "</style><b>", "a&b;", "\"'", "]]>", "\x00\ud800\u202e", "a\nb"]
)


def page(graph, plan, **options):
    return render_html(plan, graph, simulated_step(plan), **options)


def parsed(text):
    """The page as XML, which it is as well."""
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def cells(text, label, part):
    """The texts of a table's rows."""
    region = next(e for e in parsed(text).iter("div") if e.get("aria-label") == label)
    return [["".join(c.itertext()) for c in row] for row in region.find(f"table/{part}")]


class Balance(HTMLParser):
    """Checks that elements are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.seen.add(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_and_shows_everything():
    graph, plan = small()
    text = page(graph, plan)
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert "script" not in parser.seen
    assert [e.text for e in parsed(text).iter("h2")] == [
        *("Stages", "Memory", "Sent between stages", "Timeline", "Layer graph")
    ]
    for name in plan.node_names:
        assert f">{name}<" in text


@pytest.mark.parametrize("kind", KINDS)
def test_svg_is_well_formed(kind):
    graph, plan = small()
    root = ElementTree.fromstring(
        render_svg(plan, kind, graph=graph, timeline=simulated_step(plan))
    )
    assert root.tag == f"{SVG}svg"
    assert float(root.get("width")) > 300


def test_nothing_is_loaded_from_elsewhere():
    graph, plan = small()
    texts = [page(graph, plan)]
    texts += [render_svg(plan, k, graph=graph, timeline=simulated_step(plan)) for k in KINDS]
    for text in texts:
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//\w|@import|<link|<script|<img|<iframe|src=|\bon\w+=", text)
        assert set(re.findall(r"url\(([^)]*)\)", text)) <= {"#stripes"}


@settings(max_examples=60)
@given(graphs(names=EVIL, most=8), EVIL)
def test_every_name_is_escaped(graph, model):
    plan = plan_of(graph, 2, model=model)
    for text in (page(graph, plan), page(None, plan)):
        parser = Balance()
        parser.feed(text)
        assert parser.open == []
        assert not parser.seen & {"script", "b"}
        text.encode()
        parsed(text)
    for kind in KINDS:
        svg = render_svg(plan, kind, graph=graph, timeline=simulated_step(plan))
        ElementTree.fromstring(svg.encode())


@settings(max_examples=60)
@given(EVIL)
def test_every_text_of_a_step_is_escaped(text):
    graph, plan = small()
    step = StepBars(text, (text,), (Bar(0, 0.0, 1.0, text, "F"),), note=text)
    parser = Balance()
    parser.feed(render_html(plan, graph, step))
    assert parser.open == []
    assert not parser.seen & {"script", "b"}
    parsed(render_html(plan, graph, step))


def test_names_are_shown_as_they_are():
    graph = graph_of(["<script>alert(1)</script>", "a & b", "'\""], [{-1}, {0}, {1}])
    rows = cells(page(graph, plan_of(graph, 3)), "Table of operations", "tbody")
    assert [row[1] for row in rows] == ["<script>alert(1)</script>", "a & b", "'\""]


def test_stage_table_has_the_figures_of_the_plan_and_their_sums():
    graph, plan = small()
    text = page(graph, plan)
    for stage, row in zip(plan.stages, cells(text, "Table of stages", "tbody"), strict=True):
        weights = stage.parameter_bytes + stage.constant_bytes
        shown = [weights, stage.gradient_bytes, stage.optimizer_bytes]
        assert row[3:6] == [format_bytes(size) for size in shown]
        assert row[6] == f"{stage.in_flight} × {format_bytes(stage.activation_bytes)}"
        assert row[7] == format_bytes(stage.working_bytes)
        assert row[9] == format_bytes(stage.memory_bytes)
        assert row[10] == f"{100 * stage.memory_bytes / plan.memory_limit:.1f} %"
    (total,) = cells(text, "Table of stages", "tfoot")
    assert total[2] == "20"
    assert total[6] == format_bytes(sum(s.in_flight * s.activation_bytes for s in plan.stages))
    assert total[9] == format_bytes(sum(stage.memory_bytes for stage in plan.stages))
    assert total[12] == format_bytes(sum(c.bytes * len(c.targets) for c in plan.cuts))


def test_what_is_recomputed_is_counted():
    graph, plan = small(recompute=(1,))
    stages = [*plan.stages]
    stages[1] = msgspec.structs.replace(stages[1], recomputed_bytes=3 * 2**20)
    plan = msgspec.structs.replace(plan, stages=tuple(stages))
    text = page(graph, plan)
    rows = cells(text, "Table of stages", "tbody")
    assert rows[1][6].endswith(" + 3.00 MiB")
    assert rows[1][9] == format_bytes(stages[1].memory_bytes)
    assert "repeat their forward pass: 1;" in text
    (total,) = cells(text, "Table of stages", "tfoot")
    assert total[9] == format_bytes(sum(stage.memory_bytes for stage in stages))
    assert "part-recomputed" in render_svg(plan, "memory")


def test_cuts_are_listed_and_their_bytes_stand_on_the_edges():
    graph, plan = small()
    rows = cells(page(graph, plan), "Table of tensors between stages", "tbody")
    assert [(row[1], row[2]) for row in rows] == [
        (cut.tensor, format_bytes(cut.bytes)) for cut in plan.cuts
    ]
    drawing = ElementTree.fromstring(render_svg(plan, "graph", graph=graph))
    texts = [element.text for element in drawing.iter(f"{SVG}text")]
    assert texts.count(format_bytes(plan.cuts[0].bytes)) == len(plan.cuts)


def test_weights_of_several_stages_are_mentioned():
    graph, plan = small()
    tie = Tie(weight="a/kernel", stages=(0, 1), bytes=2048)
    tied = msgspec.structs.replace(plan, ties=(tie,))
    assert "1 weight of several stages, 2.00 KiB: once a step" in page(graph, tied)
    assert "of several stages" not in page(graph, plan)


def test_memory_bars_are_as_high_as_their_parts():
    _, plan = small(memory_limit=None, recompute=(2,))
    again = msgspec.structs.replace(plan.stages[2], recomputed_bytes=2**17)
    stages = (*plan.stages[:2], again, plan.stages[3])
    plan = msgspec.structs.replace(plan, stages=stages)
    root = ElementTree.fromstring(render_svg(plan, "memory"))
    heights = {}
    for group in root.iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        if title is not None:
            stage = int(re.match(r"Stage (\d+):", title.text)[1])
            height = float(group.find(f"{SVG}rect").get("height"))
            heights[stage] = heights.get(stage, 0) + height
    for i, stage in enumerate(plan.stages):
        share = stage.memory_bytes / plan.stages[0].memory_bytes
        assert heights[i] / heights[0] == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("limit", "shown"),
    [(2**20, "limit 1.00 MiB"), (2**34, "limit 16.0 GiB, far above"), (1000, "limit 1000 B")],
)
def test_limit_is_drawn_and_what_exceeds_it_is_marked(limit, shown):
    graph, plan = small(memory_limit=limit)
    text = page(graph, plan)
    assert shown.replace("1000 B", format_bytes(1000)) in text
    assert ('class="over' in text) == (limit == 1000)


def test_limits_of_unequal_devices_are_drawn_stage_by_stage():
    graph, plan = small()
    sizes = [stage.memory_bytes for stage in plan.stages]
    limits = tuple(size + (-1 if i == 1 else 1) * 100 for i, size in enumerate(sizes))
    plan = msgspec.structs.replace(plan, memory_limit=limits)
    rows = cells(page(graph, plan), "Table of stages", "tbody")
    shares = [f"{100 * size / limit:.1f} %" for size, limit in zip(sizes, limits, strict=True)]
    assert [row[10] for row in rows] == shares
    drawing = ElementTree.fromstring(render_svg(plan, "memory"))
    (line,) = [e for e in drawing.iter(f"{SVG}path") if e.get("class") == "limit"]
    assert line.get("d").count("M") == len(sizes)
    over = [e for e in drawing.iter(f"{SVG}text") if "over" in (e.get("class") or "")]
    assert [e.text for e in over] == [shares[1]]
    assert f"{shares[1]} of {format_bytes(limits[1])}" in page(graph, plan)


def test_an_svg_file_says_what_it_is_of():
    graph, plan = small(bubble=0.125)
    text = render_svg(plan, "graph", graph=graph)
    for figure in (
        f"Plan of &#x27;{plan.model}&#x27;",
        "20 operations on 4 stages",
        "bubble 12.5 %",
    ):
        assert figure in text
    assert "Coloured lines are tensors sent between stages" in text
    for kind in ("kindF", "part-weights", "Stage 3"):
        assert kind in render_svg(plan, "sheet", graph=graph, timeline=simulated_step(plan))


def test_a_graph_of_some_stages_fits_the_page():
    graph, plan = small()
    drawing = re.search(r'aria-label="20 operations.*?style="([^"]*)"', render_html(plan, graph))
    assert drawing is not None
    assert drawing[1].startswith("width:100%;max-width:")


def test_boxes_of_several_operations_say_what_works_in_them():
    graph = residual_graph(300)
    boxes = [box for own in outline(plan_of(graph, 2), graph).columns for box in own]
    runs = [box for box in boxes if box.role == "run"]
    assert runs
    assert all(re.fullmatch(r"\d+ ops · \d+ \w+", box.note) for box in runs)


def test_bubble_is_that_of_the_bars():
    graph, plan = small()
    step = simulated_step(plan)
    text = page(graph, plan)
    assert f"Ranks wait {100 * step.bubble:.1f} % of the time" in text
    for idle in step.idle:
        assert f"idle {100 * idle:.1f} %" in text


def test_bars_count_what_is_idle():
    step = StepBars("x", ("a", "b"), (Bar(0, 0.0, 2.0, "F0", "F"), Bar(1, 2.0, 4.0, "F0", "F")))
    assert step.length == 4.0
    assert step.idle == (0.5, 0.5)
    assert step.bubble == 0.5
    assert StepBars("x", ("a",), ()).bubble == 0.0


@pytest.mark.parametrize(
    "bar",
    [
        Bar(1, 0.0, 1.0, "F0", "F"),
        Bar(0, 1.0, 0.5, "F0", "F"),
        Bar(0, 0.0, float("nan"), "F0", "F"),
        Bar(0, 0.0, 1.0, "X0", "X"),
        Bar(0, -1.0, 1.0, "F0", "F"),
        Bar(0, 0.0, 1.0, "0R0", "R"),
    ],
)
def test_bars_that_cannot_be_are_refused(bar):
    with pytest.raises(PlanError, match="Received: Bar"):
        StepBars("x", ("a",), (bar,))
    with pytest.raises(PlanError, match=r"kind R on ranks.*Received: Bar"):
        StepBars("x", ("a",), (), reductions=(bar._replace(kind="F", start=0.0, end=1.0),))


def test_replicas_and_their_sums_are_drawn():
    graph, plan = small(num_replicas=2, placement="replicas-together", fusion_threshold=2**20)
    step = simulated_step(plan, HardwareSpec(1e9, bandwidth=1e6))
    assert step.exposed > 0
    alone = msgspec.structs.replace(plan, num_replicas=1, batch_size=plan.batch_size // 2)
    assert step.bubble == simulated_step(alone, HardwareSpec(1e9, bandwidth=1e6)).bubble
    text = render_html(plan, graph, step)
    share = f"{100 * step.exposed / step.length:.1f} % of the step waits for that alone"
    assert share in text
    assert "Placement replicas-together" in text
    assert "buckets of up to 1.00 MiB" in text
    rows = cells(text, "Ranks of replicas", "tbody")
    assert rows == [["0", *(f"rank {2 * p}" for p in range(4))],
                    ["1", *(f"rank {2 * p + 1}" for p in range(4))]]  # fmt: skip
    drawing = ElementTree.fromstring(render_svg(plan, "timeline", timeline=step))
    strips = [e for e in drawing.iter(f"{SVG}rect") if e.get("class") == "kindR"]
    assert len(strips) == len(step.reductions) + 1  # and the legend
    assert "reduction over replicas" in text
    assert "Ranks of replicas" not in page(*small())


def test_times_in_seconds_and_steps_without_work():
    graph, plan = small()
    bars = (Bar(0, 0.0, 0.012, "F0", "F"), Bar(0, 0.012, 0.1, "BW0", "BW"))
    text = render_html(plan, graph, StepBars("x", ("rank 0",), bars))
    assert "One step takes 100 ms." in text
    assert ">20 ms<" in text
    assert "F0: forward, 0 µs to 12 ms" in text
    parsed(render_html(plan, graph, StepBars("x", ("rank 0",), ())))


def test_thousand_layers_make_a_small_page():
    graph = residual_graph(1000, long_skips=4)
    plan = plan_of(graph, 8, schedule="zb-h1", micro_batches=64)
    text = page(graph, plan)
    assert len(text) < 1_000_000
    drawing = ElementTree.fromstring(render_svg(plan, "graph", graph=graph))
    assert float(drawing.get("height")) < 1500


def test_long_steps_are_drawn_without_details_or_not_at_all():
    graph, plan = small()
    many = tuple(Bar(0, float(i), i + 1.0, f"F{i}", "F") for i in range(60_000))
    text = render_html(plan, graph, StepBars("x", ("rank 0",), many))
    assert len(text) < 3_000_000
    over = StepBars("x", ("rank 0",), many * 2)
    assert "too many computations" in render_html(plan, graph, over)
    with pytest.raises(ConfigurationError, match="120,000"):
        render_svg(plan, "timeline", timeline=over)


def test_without_a_step_the_page_says_so():
    graph, plan = small()
    assert "the step was not simulated" in render_html(plan, graph)


def test_one_stage_and_no_graph():
    graph = residual_graph(3)
    for known in (graph, None):
        text = page(known, plan_of(graph, 1, micro_batches=1))
        assert "Nothing: there is one stage." in text


def test_what_cannot_be_drawn_is_refused():
    graph, plan = small()
    with pytest.raises(ConfigurationError, match="kind='pie'"):
        render_svg(plan, "pie")
    with pytest.raises(ConfigurationError, match="timeline=None"):
        render_svg(plan, "timeline")
    with pytest.raises(PlanError, match="another model"):
        render_html(plan, residual_graph(21))
    with pytest.raises(PlanError, match="no cut for"):
        render_html(msgspec.structs.replace(plan, cuts=plan.cuts[1:]), graph)
    with pytest.raises(PlanError, match="no cut for"):
        render_html(msgspec.structs.replace(plan, cuts=plan.cuts[::-1]), graph)
    with pytest.raises(PlanError, match="stays on its stage"):
        render_html(msgspec.structs.replace(plan, cuts=plan.cuts * 2), graph)
