import msgspec
import pytest

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.units import format_bytes, parse_bytes
from tarantella_pp.partition.plan.plan_parts import Certificate
from tarantella_pp.partition.plan.report import as_text
from tests.helpers.plans import chain_graph, plan_of

PLAN = plan_of(chain_graph(), [0, 0, 1, 1])


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
    words = ("16GB", "16 GiB", "1.5k", "512", "3B", 1e6, 7)
    values = [16 * 10**9, 16 * 2**30, 1500, 512, 3, 10**6, 7]
    assert [parse_bytes(word, "memory_limit") for word in words] == values


@pytest.mark.parametrize("wrong", ["", "GB", "-1GB", "1XB", "iB", 0, -5, True, None, 1e400, [1]])
def test_what_is_no_number_of_bytes_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="Received: memory_limit="):
        parse_bytes(wrong, "memory_limit")
