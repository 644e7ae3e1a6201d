"""External graphs: the public ones have known optima, broken ones a clear error."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import ConfigurationError, GraphError
from tarantella_pp.partition.external import external_graph
from tarantella_pp.partition.external.external_graph import (
    load_graph,
    loads_graph,
    to_problem,
)
from tarantella_pp.partition.solvers.solve import solve
from tests.helpers.draws import examples

GRAPHS = Path(__file__).parent / "graphs"
OPTIMA = json.loads((GRAPHS / "optima.json").read_text())
SMALL = {
    "name": "small",
    "units": {"time": "ms", "memory": "bytes"},
    "nodes": [
        {"id": 0, "name": "a", "time": 1.0, "memory": 4},
        {"id": 1, "name": "b", "time": 2.0, "memory": 5},
        {"id": 2, "name": "c", "time": 3.0, "memory": 6},
    ],
    "edges": [
        {"src": 0, "dst": 1, "comm": 0.5, "bytes": 8, "tensor": 0},
        {"src": 1, "dst": 2, "comm": 0.25, "bytes": 4, "tensor": None},
    ],
    "tensors": [{"id": 0, "src": 0, "nodes": [0, 1], "comm": 0.5, "bytes": 8}],
}


@pytest.mark.parametrize(
    "row", OPTIMA, ids=[f"{row['graph']}-{row['objective']}-{row['S']}" for row in OPTIMA]
)
def test_public_graphs_are_solved_to_their_optimum(row):
    graph = load_graph(GRAPHS / f"{row['graph']}.json")
    problem = to_problem(graph, row["S"], row["objective"])
    solution = solve(problem)
    assert solution.certificate.value == pytest.approx(row["best"], rel=1e-6)
    assert solution.certificate.optimal
    assert problem.violation(solution.assignment) is None


def test_a_graph_is_read_as_it_stands():
    graph = loads_graph(json.dumps(SMALL))
    assert [node.name for node in graph.nodes] == ["a", "b", "c"]
    assert graph.edges == ((0, 1), (1, 2))
    assert graph.tensors[0].comm == 0.5
    assert graph.units == {"time": "ms", "memory": "bytes"}
    problem = to_problem(graph, 2, "load", memory_limit=100)
    assert problem.work.tolist() == [1.0, 2.0, 3.0]
    assert problem.static_memory.tolist() == [4.0, 5.0, 6.0]
    assert problem.evaluate((0, 1, 1)).value == 5.5


def test_there_are_no_pipelines_of_ten_thousand_stages():
    with pytest.raises(ConfigurationError, match="num_stages=10000"):
        to_problem(loads_graph(json.dumps(SMALL)), 10_000, "load")


def test_edges_alone_make_tensors():
    plain = {key: value for key, value in SMALL.items() if key != "tensors"}
    plain["edges"] = [{"src": 0, "dst": 1, "comm": 0.5}, {"src": 1, "dst": 2}]
    graph = loads_graph(json.dumps(plain))
    assert [tensor.nodes for tensor in graph.tensors] == [(0, 1), (1, 2)]


def change(path, value):
    data = copy.deepcopy(SMALL)
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes",), [], "at least one node"),
        (("nodes",), 3, "`array`.* at nodes. Received: 3"),
        (("nodes",), KeyError, "missing required field `nodes`"),
        (("nodes", 1, "time"), -1.0, r">= 0.0 at nodes\[1\].time. Received: -1.0"),
        (("nodes", 1, "time"), float("nan"), "Not JSON"),
        (("nodes", 1, "memory"), float("inf"), "Not JSON"),
        (("nodes", 1, "memory"), 1e201, "<= 1e.200"),
        (("nodes", 1, "memory"), 10**400, r"out of range at nodes\[1\].memory"),
        (("nodes", 1, "memory"), True, "Expected `float`, got `bool`"),
        (("nodes", 1, "memory"), "5", "Expected `float`, got `str`"),
        (("nodes", 1, "memory"), KeyError, r"required field `memory` at nodes\[1\]"),
        (("nodes", 1, "colour"), 1, r"unknown field `colour` at nodes\[1\]"),
        (("nodes", 1, "id"), 2, "in order"),
        (("nodes", 1, "id"), 1.0, "Expected `int`, got `float`"),
        (("nodes", 1, "name"), 7, "Expected `str`, got `int`"),
        (("edges", 0, "dst"), 9, r"edges\[0\].dst is one of 0..2. Received: 9"),
        (("edges", 0, "dst"), 0, "to itself"),
        (("edges", 1, "dst"), 0, "cycle.*nodes"),
        (("edges", 0, "tensor"), 5, "tensor"),
        (("edges", 0, "weight"), 5, "unknown field"),
        (("tensors", 0, "src"), 2, "lacks its own src"),
        (("tensors", 0, "nodes"), [0, 0], "once"),
        (("tensors", 0, "nodes"), [], "lacks its own src"),
        (("tensors", 0, "comm"), -0.1, ">= 0.0"),
        (("name",), None, "Expected `str`, got `null` at name. Received: None"),
        (("name",), "\ud800", "Not JSON"),
        (("nodes", 1, "name"), "b\udfff", "Not JSON"),
        (("units",), "ms", "Expected `object`, got `str` at units. Received: 'ms'"),
        (("units", "time"), 3, r"Expected `str`, got `int` at units.*time': 3"),
        (("surprise",), 1, "unknown field"),
    ],
)
def test_what_is_wrong_is_named(path, value, message):
    with pytest.raises(GraphError, match=message):
        loads_graph(json.dumps(change(path, value)))


def test_a_cost_of_thousands_of_digits():
    text = json.dumps(SMALL).replace('"memory": 5', '"memory": 1' + "0" * 5000)
    with pytest.raises(GraphError, match=r"out of range at nodes\[1\].memory"):
        loads_graph(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"nodes": NaN}',
        '{"nodes": [], "nodes": []}',
        "7",
        "é",
    ],
)
def test_text_that_is_no_graph(text):
    with pytest.raises(GraphError):
        loads_graph(text)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(GraphError, match="cannot be read"):
        load_graph(tmp_path / "missing.json")
    with pytest.raises(GraphError, match="cannot be read"):
        load_graph(tmp_path)
    path = tmp_path / "graph.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match="UTF-8"):
        load_graph(path)
    path.write_text(json.dumps(SMALL))
    assert load_graph(str(path)).name == "small"
    monkeypatch.setattr(external_graph, "MAX_BYTES", 10)
    with pytest.raises(GraphError, match="larger than"):
        load_graph(path)


KEYS = ["id", "name", "time", "memory", "src", "dst", "nodes", "edges"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, 2, -1, 1e308, "nodes", "src"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)


def places(value, path=()):
    yield path
    if not isinstance(value, dict | list):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from places(inner, (*path, key))


@examples(600)
@given(st.data())
def test_fuzzed_graphs_are_refused_or_sound(data):
    spoiled = copy.deepcopy(SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in places(spoiled) if path]))
        at = spoiled
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = data.draw(json_values)
    try:
        graph = loads_graph(json.dumps(spoiled))
    except GraphError:
        return
    problem = to_problem(graph, 2, "load")
    assert np.isfinite(problem.work).all()
    assert problem.violation(solve(problem).assignment) is None


@examples(300)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_fuzzed_text_is_refused(text):
    with pytest.raises(GraphError):
        loads_graph(text)
