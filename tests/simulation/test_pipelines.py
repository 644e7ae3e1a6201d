"""One pipeline and many side by side: played, calculated, and gradients summed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule import ScheduleSpec
from tarantella_pp.simulation import Costs, LinkCosts, StageCosts, pipelines
from tarantella_pp.simulation.pipelines import Network, Nodes, pipeline_step, replicated_step


def step_of(name, costs, micro_batches, num_ranks=None):
    return pipeline_step(ScheduleSpec.of(name, len(costs.stages), num_ranks), costs, micro_batches)


def calculated(name, costs, micro_batches):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "MOST_PLAYED", 0)
        return step_of(name, costs, micro_batches)


@settings(max_examples=40)
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 7), st.integers(1, 20))
def test_closed_forms_are_what_is_played(name, stages, micro_batches) -> None:
    costs = Costs.uniform(stages)
    played, formula = (make(name, costs, micro_batches) for make in (step_of, calculated))
    assert played.events
    assert not formula.events
    for what in ("step_seconds", "busy_seconds", "peak_bytes", "bubble_fraction"):
        assert getattr(formula, what) == pytest.approx(getattr(played, what), abs=1e-9)
    assert formula.placement == played.placement


@settings(max_examples=40)
@given(st.sampled_from(["gpipe", "1f1b"]), st.lists(st.floats(0.1, 3), min_size=1, max_size=6),
       st.integers(1, 12))  # fmt: skip
def test_calculated_steps_of_unequal_stages_are_not_too_short(name, seconds, micro_batches) -> None:
    costs = Costs(tuple(StageCosts(s, s, s) for s in seconds))
    played, formula = (make(name, costs, micro_batches) for make in (step_of, calculated))
    assert formula.step_seconds >= played.step_seconds * (1 - 1e-9)
    assert formula.busy_seconds == pytest.approx(played.busy_seconds)


def test_the_first_message_there_and_back_is_counted() -> None:
    costs = Costs.uniform(3, link=LinkCosts(0.25, 0.25))
    step = calculated("gpipe", costs, 1)
    assert step_of("gpipe", costs, 1).step_seconds == 9 + 4 * 0.5
    assert step.step_seconds == pytest.approx(9 + 4 * 0.5)


def test_thousands_of_ranks_are_calculated() -> None:
    step = step_of("1f1b", Costs.uniform(4096), 8192)
    assert not step.events
    assert step.num_ranks == 4096
    assert step.bubble_fraction == pytest.approx(4095 / (8192 + 4095))
    assert step.peak_bytes[0] == 4096


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "zb-auto"])
def test_what_has_no_formula_is_refused(name) -> None:
    with pytest.raises(ScheduleError, match="too large to be played"):
        step_of(name, Costs.uniform(512), 1024)


def test_ring_allreduce() -> None:
    network = Network(bandwidth=100.0, latency=0.5)
    assert network.allreduce_seconds(400.0, 1) == 0
    assert network.allreduce_seconds(0.0, 8) == 0
    # Six messages of a quarter.
    assert network.allreduce_seconds(400.0, 4) == 6 * (1.0 + 0.5)


def test_hierarchical_allreduce() -> None:
    network = Network(bandwidth=100.0, latency=0.5, inside=1000.0, peers_inside=2)
    # Inside two messages of a half; then, of four replicas on two hosts, both halves go round.
    assert network.allreduce_seconds(400.0, 2) == 2 * (0.2 + 0.5)
    assert network.allreduce_seconds(400.0, 4) == 2 * (0.2 + 0.5) + 2 * (2.0 + 0.5)
    assert network.allreduce_seconds(400.0, 16) == 2 * (0.2 + 0.5) + 14 * (0.5 + 0.5)
    assert Network(None, 0.5, None, 2).allreduce_seconds(400.0, 4) == 2.0


def replicated(step, buckets, replicas=2, bandwidth=1.0):
    return replicated_step(step, buckets, Network(bandwidth), replicas)


def test_only_the_sum_that_ends_last_is_waited_for() -> None:
    step = step_of("1f1b", Costs.uniform(2), 2)
    # Stage 1 is done two seconds before stage 0 (its last BW ends as that of stage 0 begins).
    assert step.gradients_ready == (9.0, 7.0)
    assert replicated(step, [[1.0], [1.0]]).step_seconds == 10.0
    assert replicated(step, [[1.0], [3.0]]).step_seconds == 10.0
    assert replicated(step, [[], [2.0]]).step_seconds == 9.0
    assert replicated(step, [[1.0], [9.0]]).step_seconds == 16.0
    assert replicated(step, [[1.0], [9.0]]).exposed_seconds == 7.0
    assert replicated(step, [[1.0], [9.0]]).bubble_fraction == step.bubble_fraction
    assert replicated(step, [[1.0], [9.0]], 1).step_seconds == 9.0
    assert replicated(step, [[1.0], [9.0]], bandwidth=None).step_seconds == 9.0


def together(num_ranks):
    return lambda replica, rank: replica * num_ranks + rank


def apart(num_replicas):
    return lambda replica, rank: rank * num_replicas + replica


def test_ranks_of_a_host_share_its_card() -> None:
    layout = Nodes(2, 12.0, 100.0).layout(6, 5, together(6))
    assert (layout.hosts, layout.peers_inside) == ((0, 0, 1, 1, 2, 2), 1)
    speeds = layout.link_speeds(
        {(a, b): (a, b) for a in range(6) for b in (a - 1, a + 1) if 0 <= b < 6}
    )
    assert speeds[0, 1] == speeds[3, 2] == 100
    # The host in the middle sends activations on and gradients back.
    assert (speeds[1, 2], speeds[2, 1], speeds[3, 4], speeds[4, 3]) == (12, 6, 6, 12)
    assert layout.network(0.5) == Network(6.0, 0.5, 100.0, 1)


def test_replicas_side_by_side_send_at_once() -> None:
    layout = Nodes(4, 12.0, 100.0).layout(2, 4, apart(4))
    assert (layout.hosts, layout.peers_inside) == ((0, 1), 4)
    assert layout.link_speeds({(0, 1): (0, 1)}) == {(0, 1): 3.0}
    assert layout.network(0.5) == Network(12.0, 0.5, 100.0, 4)
    assert Nodes(8, 12.0, 100.0).layout(2, 4, apart(4)).hosts == (0, 0)
    assert Nodes(4, 12.0, 100.0).layout(2, 6, together(2)).peers_inside == 2


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_all_replicas_lie_alike_or_are_refused(ranks, replicas, per_node, side_by_side) -> None:
    rank_of = apart(replicas) if side_by_side else together(ranks)
    nodes, inner = Nodes(per_node, 1.0, 1.0), replicas if side_by_side and ranks > 1 else ranks
    if replicas > 1 and inner % per_node and per_node % inner:
        with pytest.raises(ScheduleError, match=f"ranks_per_node={per_node}"):
            nodes.layout(ranks, replicas, rank_of)
        return
    layout = nodes.layout(ranks, replicas, rank_of)
    for replica in range(replicas):
        hosts = [rank_of(replica, rank) // per_node for rank in range(ranks)]
        for one in range(ranks):
            for other in range(ranks):
                assert (hosts[one] == hosts[other]) == (layout.hosts[one] == layout.hosts[other])
    for rank in range(ranks):
        homes = Counter(rank_of(replica, rank) // per_node for replica in range(replicas))
        assert max(homes.values()) == layout.peers_inside
