import re
from xml.etree import ElementTree

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan import page
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan_simulation import planned_step
from tests.helpers.pictured import graphs, plan_of, residual_graph, small

EVIL = st.text(min_size=1) | st.sampled_from(
    ["<script>alert(1)</script>", "</style><b>", "a&b;", "\"'", "]]>", "\x00\ud800\u202e", "a\nb"]
)


def parsed(text):
    """The page as XML, which it is as well; so every element is closed, in order."""
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def picture(text, label):
    return next(e for e in parsed(text).iter("div") if e.get("aria-label") == label).find("svg")


def cells(text, label, part):
    region = next(e for e in parsed(text).iter("div") if e.get("aria-label") == label)
    return [["".join(c.itertext()) for c in row] for row in region.find(f"table/{part}")]


def test_all_is_shown_and_nothing_loaded_from_elsewhere():
    text = page.render_html(small())
    titles = [*("Stages", "Memory", "Sent between stages", "Timeline", "Operations")]
    assert [e.text for e in parsed(text).iter("h2")] == titles
    assert not re.search(r"https?:|//\w|@import|<link|<script|<img|<iframe|src=|\bon\w+=", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#stripes", "#arrow"}


@settings(max_examples=30)
@given(graphs(names=EVIL, most=8), EVIL)
def test_every_name_is_escaped(graph, model):
    plan = plan_of(graph, 2, model=model)
    text = page.render_html(plan)
    text.encode()
    assert not {element.tag for element in parsed(text).iter()} & {"script", "b"}
    rows = cells(text, "Table of operations", "tbody")
    clean = [name for name in plan.node_names if name.isprintable()]
    assert {*clean} <= {row[1] for row in rows}


def test_stage_table_has_the_figures_of_the_plan_and_their_sums():
    plan = small()
    text = page.render_html(plan)
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


def test_replicas_and_their_sums_are_drawn():
    plan = small(num_replicas=2, placement="replicas-together", fusion_threshold=2**20)
    plan = msgspec.structs.replace(plan, machine=HardwareSpec(1e9, bandwidth=1e6))
    step = planned_step(plan)
    assert step.exposed_seconds > 0
    alone = msgspec.structs.replace(plan, num_replicas=1, batch_size=plan.batch_size // 2)
    assert step.bubble_fraction == planned_step(alone).bubble_fraction
    text = page.render_html(plan)
    rows = cells(text, "Ranks of replicas", "tbody")
    assert rows == [["0", *(f"rank {2 * p}" for p in range(4))],
                    ["1", *(f"rank {2 * p + 1}" for p in range(4))]]  # fmt: skip
    drawing = picture(text, "Timeline")
    strips = [e for e in drawing.iter("rect") if e.get("class") == "kindA"]
    assert len(strips) == sum(map(len, step.reductions))
    assert "reduction over replicas" in text
    assert "Ranks of replicas" not in page.render_html(small())


def test_thousand_layers_make_a_small_page():
    graph = residual_graph(1000, long_skips=4)
    plan = plan_of(graph, 8, schedule="zb-h1", micro_batches=64)
    text = page.render_html(plan)
    assert len(text) < 1_000_000
    assert float(picture(text, "Operations").get("height")) < 1500


def test_without_a_step_seconds_or_cuts_the_page_says_so():
    plan = small()
    stages = tuple(msgspec.structs.replace(stage, flops=0.0) for stage in plan.stages)
    text = page.render_html(msgspec.structs.replace(plan, stages=stages))
    assert "Ranks wait 0.0 % of the time" in text
    assert "there is one stage." in page.render_html(plan_of(residual_graph(3), 1, micro_batches=1))
    assert "the step was not simulated" in page.render_html(small(schedule="mine"))


def test_a_notebook_shows_the_page():
    plan = small()
    (frame,) = [ElementTree.fromstring(plan._repr_html_())]
    assert frame.tag == "iframe"
    assert frame.get("srcdoc").split() == page.render_html(plan).split()


@settings(max_examples=40, deadline=None)
@given(graphs(names=st.text(min_size=1)), st.integers(1, 5))
def test_all_operations_and_cuts_are_drawn(graph, stages):
    plan = plan_of(graph, min(stages, len(graph.nodes)))
    drawn = page.graph_drawing(plan)
    boxes = [box for column in drawn["columns"] for box in column["boxes"]]
    assert all(0 < len(box["title"]) <= page.TITLE_CHARACTERS for box in boxes)
    if len(graph.nodes) <= page.MOST_BOXES:
        assert len(boxes) == len(graph.nodes)
    lines = sum(route["hover"].count(": stage ") for route in drawn["routes"])
    assert lines >= len(plan.cuts)
    assert page.shorten("abcdefghij", 7) == "ab…ghij"
