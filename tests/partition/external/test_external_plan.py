"""Plans of external graphs: what is read is checked, whatever it is."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.external.external_graph import loads_graph
from tarantella_pp.partition.external.external_plan import ExternalPlan
from tarantella_pp.partition.external.external_planner import check_plan, plan_graph
from tests.helpers.draws import examples

DIAMOND = {
    "name": "diamond",
    "units": {"time": "ms"},
    "nodes": [
        {"id": i, "time": 1.0 + i, "memory": 2.0, "flops": 3.0, "name": name}
        for i, name in enumerate("abcd")
    ],
    "edges": [{"src": a, "dst": b} for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))],
    "tensors": [
        {"id": 0, "src": 0, "nodes": [0, 1, 2], "comm": 0.5, "bytes": 8},
        {"id": 1, "src": 1, "nodes": [1, 3], "comm": 0.25, "bytes": 4},
        {"id": 2, "src": 2, "nodes": [2, 3], "comm": 0.25, "bytes": 4},
    ],
}
GRAPH = loads_graph(json.dumps(DIAMOND))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("balance", "value"), [("memory", 4.0), ("time", 6.0), ("load", 6.5), ("flops", 6.0)]
)
def test_figures_are_those_of_the_graph(balance, value) -> None:
    plan = plan_graph(GRAPH, 2, balance)
    assert plan.certificate.value == value
    assert plan.certificate.optimal
    assert sum(stage.nodes for stage in plan.stages) == 4
    assert sum(stage.memory for stage in plan.stages) == 8.0
    assert sum(stage.work for stage in plan.stages) == (12.0 if balance == "flops" else 10.0)
    check_plan(plan, GRAPH)
    assert plan.units == {"time": "ms"}
    assert ExternalPlan.from_json(plan.to_json()) == plan


def test_no_more_stages_are_used_than_help() -> None:
    plan = plan_graph(GRAPH, 9, "load")
    assert len(plan.stages) == 9
    used = [stage.nodes > 0 for stage in plan.stages]
    assert used == sorted(used, reverse=True)
    assert plan.certificate.optimal
    check_plan(plan, GRAPH)


@pytest.mark.parametrize("place", range(4))
def test_check_sees_every_node(place) -> None:
    other = copy.deepcopy(DIAMOND)
    other["nodes"][place]["time"] += 0.125
    with pytest.raises(PlanError, match="work of stage"):
        check_plan(plan_graph(GRAPH, 2), loads_graph(json.dumps(other)))
    other = copy.deepcopy(DIAMOND)
    other["nodes"][place]["name"] = "z"
    with pytest.raises(PlanError, match=f"node {place} is"):
        check_plan(plan_graph(GRAPH, 2), loads_graph(json.dumps(other)))


@examples(300)
@given(st.data())
def test_whatever_is_read_is_a_plan_or_refused(data) -> None:
    plan = json.loads(plan_graph(GRAPH, 2, "load").to_json())
    target = data.draw(st.sampled_from([plan, plan["certificate"], plan["stages"][0]]))
    key = data.draw(st.sampled_from([*target, "colour"]))
    if data.draw(st.booleans()):
        target.pop(key, None)
    else:
        target[key] = data.draw(ANYTHING)
    try:
        found = ExternalPlan.from_json(json.dumps(plan))
    except PlanError:
        return
    assert ExternalPlan.from_json(found.to_json()) == found


@given(st.text() | st.binary())
def test_text_that_is_no_plan(text) -> None:
    with pytest.raises(PlanError):
        ExternalPlan.from_json(text)
