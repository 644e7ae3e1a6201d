import itertools
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.runtime.stubs import PLAIN, Seconds, StubPipeline, chain
from tarantella_pp.errors import CommunicationError, UnsupportedModelError
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.executor import Recorder
from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries, stage_edges
from tarantella_pp.runtime.stage.stage_messages import StageMessages
from tarantella_pp.schedule import Transfer, send_window
from tests.helpers.mpi import mpi_run

MICRO_BATCHES = 20
LARGE = 1 << 16
"""Elements of a row, for messages that MPI does not buffer."""


def run_ahead():
    """Runs on both ranks: the first stage is quick, the second one slow. When did what end?"""
    ranks, found = world(), {}
    seconds = Seconds(*([0.0] * 3 if ranks.rank == 0 else [5e-3] * 3))
    for name in ("gpipe", "forward"):
        recorder = Recorder(2)
        pipeline = StubPipeline(name, 2, MICRO_BATCHES, seconds, ranks, LARGE, recorder)
        for _ in range(2):
            pipeline.step()
        ranks.flush()
        found[name] = [
            (span.what.micro_batch, span.what.operation, span.end)
            for span in recorder.steps[0].spans[0]
            if isinstance(span.what, Transfer) and span.what.direction == "F"
        ]
    return found


@pytest.mark.mpi
def test_a_stage_is_ahead_of_a_slower_one_by_a_window_of_messages():
    first, second = mpi_run(2, run_ahead, timeout=60).check().results
    for name in ("gpipe", "forward"):
        window = send_window(name, 2, 2)
        sent = {i: end for i, operation, end in first[name] if operation == "S"}
        taken = sorted(end for _, operation, end in second[name] if operation == "R")
        assert len(sent) == len(taken) == MICRO_BATCHES
        ahead = [i + 1 - np.searchsorted(taken, end) for i, end in sent.items()]
        # the receiver expects two ahead, which count as taken for the sender
        assert 2 <= max(ahead) <= window + 3


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "window"),
    [("gpipe", 4, 4, 6), ("forward", 2, 2, 4), ("gpipe", 4, 2, None), ("1f1b", 4, 4, None)],
)
def test_schedules_with_all_forwards_first_have_a_window(name, stages, ranks, window):
    assert send_window(name, stages, ranks) == window


class MemoryRank:
    """A rank whose messages stay in memory, matched as MPI does: equal tags in their order."""

    largest_tag = 1 << 20

    def __init__(self):
        self._sent, self._posted = defaultdict(list), defaultdict(itertools.count)

    def send(self, arrays, dest, tag, label=""):
        self._sent[tag].append(arrays)

    def post_receive(self, specs, source, tag, label=""):
        number = next(self._posted[tag])
        return SimpleNamespace(wait=lambda: self._sent[tag][number])


def messages_over(rank):
    """Messages between two stages, both on one rank."""
    graph = chain(2, 1)
    edges = stage_edges(stage_boundaries(graph, [0, 1], 2))
    return StageMessages(rank, graph, edges, [0, 1], conversion=PLAIN)


@given(st.permutations(range(130)), st.permutations(range(130)), st.sampled_from("FB"))
def test_stages_may_run_micro_batches_in_different_orders(sent, received, direction):
    messages = messages_over(MemoryRank())
    pair = (0, 1) if direction == "F" else (1, 0)
    receives = [Transfer(*pair, "R", direction, i) for i in received]
    messages.begin(receives, [4] * len(received))
    for i in sent:
        messages.send(Transfer(*pair, "S", direction, i), [np.full((4, 1), i)])
    for action in receives:
        messages.expect(action)
        assert np.all(messages.receive(action)[0] == action.micro_batch)


def test_another_shape_than_the_receiver_expects_is_refused():
    messages = messages_over(MemoryRank())
    messages.begin([], [4])
    with pytest.raises(UnsupportedModelError, match=r"Stage 0 gave .* as None"):
        messages.send(Transfer(0, 1, "S", "F", 0), [np.zeros((2, 2))])


def test_more_messages_than_mpi_has_tags_are_refused():
    rank = MemoryRank()
    rank.largest_tag = 1100
    messages = messages_over(rank)
    messages.begin([], [4] * 41)
    messages.send(Transfer(0, 1, "S", "F", 30), [np.zeros((4, 1))])
    with pytest.raises(CommunicationError, match="smaller num_micro_batches"):
        messages.send(Transfer(0, 1, "S", "F", 40), [np.zeros((4, 1))])
