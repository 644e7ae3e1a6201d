import itertools
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph import json_record
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Weight
from tarantella_pp.partition.graph.units import format_bytes, parse_bytes
from tarantella_pp.partition.plan.gradient_buckets import (
    bucket_bytes,
    gradient_buckets,
    weight_replicas,
)
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import Certificate
from tarantella_pp.partition.plan.report import as_text
from tests.helpers.plans import chain_graph, plan_of

GRAPH = chain_graph()
PLAN = plan_of(GRAPH, [0, 0, 1, 1])


def test_files_of_versions_before_are_read():
    data = json.loads(PLAN.to_json())
    assert (data["format"], data["version"]) == ("tarantella_pp.plan", 1)
    data |= {"measured": [{"bytes": 5000, "exact": False}], "advice": {"balance": "flops"}}
    data |= {"except_last": [0]}
    del data["recompute"]
    for stage in data["stages"]:
        del stage["recomputed_bytes"]
        stage["deferred_bytes"] = 5
    old = Plan.from_json(json.dumps(data))
    assert old.recompute == ()
    assert old.stages == PLAN.stages
    assert str(old) == str(PLAN)


def test_check_takes_the_plan_of_this_model_whatever_its_names():
    nodes = tuple(msgspec.structs.replace(n, name=f"other_{n.id}") for n in GRAPH.nodes)
    for graph in (GRAPH, msgspec.structs.replace(GRAPH, nodes=nodes)):
        PLAN.check(graph)


def test_check_refuses_another_model():
    with pytest.raises(PlanError, match="another model, 'chain' with 4 operations; this one has 5"):
        PLAN.check(chain_graph(5))
    with pytest.raises(PlanError, match="this one has 4, or other shapes"):
        PLAN.check(chain_graph(width=9))


def test_check_refuses_an_edge_that_runs_backwards():
    backwards = msgspec.structs.replace(
        PLAN,
        assignment=(0, 1, 0, 1),
        stages=(
            msgspec.structs.replace(PLAN.stages[0], last="dense_2"),
            msgspec.structs.replace(PLAN.stages[1], first="dense_1"),
        ),
    )
    with pytest.raises(PlanError, match="'dense_2' on stage 0 needs 'dense_1' on the later stage"):
        backwards.check(GRAPH)


def edited(**changes):
    data = json.loads(PLAN.to_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = data
        for key in parents:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value
    return json.dumps(data)


def tie(**changes):
    return {"weight": "dense/kernel", "stages": [0, 1], "bytes": 256, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "unknown field `extra`"),
        ({"format": "other"}, "Invalid value 'other'"),
        ({"num_stages": 3}, "must have num_stages=3 stages. Received: 2"),
        ({"assignment": [0, 0, 1]}, "equally long"),
        ({"assignment": [0, 0, 1, 2]}, r"each node must be on a stage.*Received: \[0, 0, 1, 2"),
        ({"node_names": ["a", "a", "b", "c"]}, "unique"),
        ({"stages__1__first": "dense"}, "stages must name"),
        ({"cuts__0__targets": [0]}, "cuts must run from a stage to later ones"),
        ({"memory_limit": [5]}, r"one number, or one a stage. Received: \(5,\)"),
        ({"ties": [tie(stages=[0])]}, "ties must name two stages or more, ascending"),
        ({"recompute": [1, 0]}, r"recompute must name stages, ascending. Received: \[1, 0\]"),
        ({"stages__1__flops": 1e308}, "float` <= 1e.200 .*flops"),
        ({"machine": {"latency": 1e308}}, "float` <= 1e.200 .*latency"),
        ({"ranks": [0, 2]}, "ranks must name one for each stage"),
        ({"program": "rank 0: 0F0\nrank 1: 1F0", "num_micro_batches": 1}, "passes only"),
        ({"program": "rank 0: 0BW0 0F0\nrank 1: 1F0 1BW0", "num_micro_batches": 1}, "wait"),
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(edited(**changes))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1e999", '{"format": "tarantella_pp.plan"}', b"\xff\xfe", "[" * 99999],
)
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(PlanError, match="no valid plan"):
        Plan.from_json(text)


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    PLAN.save(tmp_path / "plan.json")
    monkeypatch.setattr(json_record, "MAX_FILE_BYTES", 100)
    with pytest.raises(PlanError, match="A plan has at most 100 bytes"):
        Plan.load(tmp_path / "plan.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = sorted(json.loads(PLAN.to_json()))
STAGE_FIELDS = [f"stages__1__{name}" for name in json.loads(PLAN.to_json())["stages"][1]]


@settings(max_examples=300)
@given(st.sampled_from(FIELDS + STAGE_FIELDS), json_values)
def test_loading_raises_nothing_but_plan_errors(path, value):
    try:
        plan = Plan.from_json(edited(**{path: value}))
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan)


REPLICAS = plan_of(chain_graph(6), [0, 0, 1, 1, 2, 2], num_replicas=2)


@given(st.integers(1, 5), st.sampled_from(["pipelines-together", "replicas-together"]))
def test_every_rank_is_one_of_a_pipeline(replicas, placement):
    plan = msgspec.structs.replace(REPLICAS, num_replicas=replicas, placement=placement)
    ranks = [plan.world_rank(r, p) for r in range(replicas) for p in range(3)]
    assert sorted(ranks) == list(range(3 * replicas))
    neighbours = 1 if placement == "pipelines-together" else replicas
    assert plan.world_rank(0, 1) - plan.world_rank(0, 0) == neighbours


def test_the_table():
    assert as_text(PLAN, 80).split("\n") == [
        "Plan of 'chain': 4 operations on 2 stages",
        "",
        " Stage  Ops  Weights  State  Activations  Memory  FLOPs  Sends",
        " ─────────────────────────────────────────────────────────────",
        "     0    2     512B  2.00K     2 x 512B   4.25K  50.0%   256B",
        "     1    2     512B  2.00K     1 x 512B   4.00K  50.0%      -",
        "",
        "Stage 0: dense .. dense_1",
        "Stage 1: dense_2 .. dense_3",
        "",
        "Schedule 1f1b: 4 micro-batches of 8 samples, batch of 32, bubble 20.0 %.",
        "Balanced by memory: largest stage 3.00 KiB, optimal (chain DP, 5 ideals, 0.001",
        "s).",
        "State = weights + gradients + optimizer state of Adam.",
        "Activations = micro-batches in flight x bytes of one.",
        "Memory = State + Activations + peak temporaries + message buffers.",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_the_width_and_loses_nothing(width):
    graph = chain_graph(6, 1000)
    nodes = tuple(
        msgspec.structs.replace(n, name=f"decoder/transformer_block_{n.id}/attention_output_{n.id}")
        for n in graph.nodes
    )
    plan = plan_of(msgspec.structs.replace(graph, nodes=nodes), [0, 1, 1, 2, 2, 2])
    text = as_text(plan, width)
    assert max(len(line) for line in text.split("\n")) <= width
    assert "…" not in text
    for stage in plan.stages:
        assert format_bytes(stage.memory_bytes, short=True) in text
        assert stage.first in text.split()  # in one piece
        assert stage.last in text.split()


def test_the_footer_says_how_good_the_plan_is():
    gap = Certificate(3300.0, 3000.0, 0.1, False, "pool DP", 1.5)
    plan = msgspec.structs.replace(PLAN, certificate=gap, memory_limit=2**20, assumed_size=256)
    plan = msgspec.structs.replace(
        plan, estimated=("LSTM", "Mixer"), bubble=None, num_replicas=2, fallbacks=("stage 1: why",)
    )
    text = " ".join(as_text(plan, 200).split())
    assert "largest stage 3.22 KiB, lower bound 2.93 KiB, gap <= 10 %" in text
    assert "Memory limit of a stage: 1.00 MiB." in text
    assert "Unknown dimensions are counted as 256." in text
    assert "Costs are guesses for: LSTM, Mixer." in text
    assert "No split backward pass, stage 1: why." in text


def test_bytes_in_words():
    values = (0, 999, 1000, 1536, 16 * 2**30, 123456789, 5 * 2**50)
    words = ["0 B", "999 B", "0.98 KiB", "1.50 KiB", "16.0 GiB", "118 MiB", "5120 TiB"]
    assert list(map(format_bytes, values)) == words
    short = ["0B", "999B", "0.98K", "1.50K", "16.0G", "118M", "5120T"]
    assert [format_bytes(value, short=True) for value in values] == short


def test_words_to_bytes():
    words = ("16GB", "16 GiB", "1.5k", "512", "3B", 1e6, 7, np.int64(7), np.float32(2.5))
    values = [16 * 10**9, 16 * 2**30, 1500, 512, 3, 10**6, 7, 7, 2]
    assert [parse_bytes(word, "memory_limit") for word in words] == values


@pytest.mark.parametrize("wrong", ["", "GB", "-1GB", "iB", 0, -5, True, np.True_, None, 1e400, [1]])
def test_what_is_no_number_of_bytes_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="Received: memory_limit="):
        parse_bytes(wrong, "memory_limit")


CHAIN = chain_graph(6, 8)
"""Six kernels of 256 bytes."""


@st.composite
def graphs(draw: st.DrawFn) -> tuple[LayerGraph, list[int], int]:
    num_stages = draw(st.integers(1, 4))
    stages = sorted(draw(st.lists(st.integers(0, num_stages - 1), min_size=1, max_size=8)))
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8))
    dtypes = st.sampled_from(["float32", "float16"])
    weights = tuple(
        Weight(i, f"w{i}", (size,), draw(dtypes), draw(st.booleans()), size)
        for i, size in enumerate(sizes)
    )
    some = st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=4)
    kinds = st.sampled_from(["Dense", "Embedding"])
    nodes = tuple(
        Node(i, f"n{i}", draw(kinds), weights=tuple(draw(some))) for i in range(len(stages))
    )
    return LayerGraph(nodes, (), (), (), weights), stages, num_stages


@given(graphs(), st.integers(1, 20))
def test_each_trained_variable_is_in_one_bucket_of_its_stage(drawn, most):
    graph, stages, num_stages = drawn
    buckets = gradient_buckets(graph, stages, num_stages, most)
    assert len(buckets) == num_stages
    users = [
        sorted({stages[n.id] for n in graph.nodes if w.id in n.weights}) for w in graph.weights
    ]
    trained = [w.id for w in graph.weights if w.trainable and users[w.id]]
    tables = {w for n in graph.nodes if n.kind == "Embedding" for w in n.weights}
    found = [w for own in buckets for bucket in own for w in bucket]
    assert sorted(found) == trained
    for stage, own in enumerate(buckets):
        tied = [any(len(users[w]) > 1 for w in bucket) for bucket in own]
        assert tied == sorted(tied)
        for bucket, size in zip(own, bucket_bytes(graph, own), strict=True):
            assert all(users[w][0] == stage for w in bucket)
            assert len({(graph.weights[w].dtype, len(users[w]) > 1) for w in bucket}) == 1
            assert size <= most or len(bucket) == 1
            assert len(bucket) == 1 or not tables.intersection(bucket)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (256, (((2,), (1,), (0,)), ((5,), (4,), (3,)))),
        (512, (((2, 1), (0,)), ((5, 4), (3,)))),
        (1, (((2,), (1,), (0,)), ((5,), (4,), (3,)))),
        (10**6, (((2, 1, 0),), ((5, 4, 3),))),
    ],
)
def test_the_last_layers_come_first(most, expected):
    assert gradient_buckets(CHAIN, [0, 0, 0, 1, 1, 1], 2, most) == expected


def fullest(sizes: list[int], owners: list[int], num_replicas: int) -> int:
    return max(
        sum(size for size, own in zip(sizes, owners, strict=True) if own == replica)
        for replica in range(num_replicas)
    )


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_no_replica_has_much_more_than_it_must(sizes: list[int], num_replicas: int) -> None:
    owners = weight_replicas(sizes, [0] * len(sizes), num_replicas)
    best = min(
        fullest(sizes, [*choice], num_replicas)
        for choice in itertools.product(range(num_replicas), repeat=len(sizes))
    )
    assert 3 * num_replicas * fullest(sizes, owners, num_replicas) <= (4 * num_replicas - 1) * best


def test_the_largest_weights_of_a_stage_are_apart() -> None:
    assert weight_replicas([4, 400, 4, 400, 300], [0] * 5, 2) == [1, 0, 1, 1, 0]
    assert weight_replicas([4, 400, 4, 400, 300], [0, 1, 0, 1, 2], 2) == [0, 0, 1, 1, 0]
    assert sorted(weight_replicas([0] * 6, [0] * 6, 3)) == [0, 0, 1, 1, 2, 2]
