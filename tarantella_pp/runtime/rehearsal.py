"""The first micro-batch, forward only, one stage after another: all ranks learn what fails.

In a step a rank whose stage fails leaves the others waiting for its messages. What can fail before
anything is trained, a stage that is refused above all, fails here, on every rank alike, and leaves
no message under way. So the ranks can go on, with another model for example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tarantella_pp import errors
from tarantella_pp.errors import TarantellaError, UnsupportedModelError
from tarantella_pp.runtime.modules.stage_boundary import StageBoundary, StageEdge
from tarantella_pp.runtime.replicas.forward_state import ForwardState
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.stage.step import Step
from tarantella_pp.runtime.stage_messages import StageMessages
from tarantella_pp.schedule import Transfer

if TYPE_CHECKING:
    from tarantella_pp.runtime.probes.stage_probe import Pieces
    from tarantella_pp.runtime.stage.stage import Stage


class Rehearsal:
    """Tries all stages out together, and leaves nothing behind."""

    def __init__(
        self,
        boundaries: Sequence[StageBoundary],
        stages: Mapping[int, Stage],
        exchange: StageMessages,
        placement: Sequence[int],
        groups: ProcessGroups,
        state: ForwardState,
    ) -> None:
        self._boundaries = boundaries
        self._stages = stages
        self._messages = exchange
        self._placement = placement
        self._communicator = groups.pipeline
        self._groups = groups
        self._state = state
        self._measures = False
        self._tried: set[tuple[bool, bool]] = set()
        self._arrived: dict[int, list[tf.Tensor]] = defaultdict(list)

    def is_due(self, training: bool, pieces: Pieces) -> bool:
        """Whether steps of a kind are yet to be tried out."""
        several = pieces.total > 1
        return (training, several) not in self._tried and (several or not pieces.is_plain)

    def run(self, step: Step) -> Exception | None:
        """Runs the first micro-batch; all ranks must call it."""
        self._arrived.clear()
        self._measures = self._state.must_measure(step.training)
        before = self._state.snapshot()
        errors = (self._try(boundary, step) for boundary in self._boundaries)
        error = next((error for error in errors if error is not None), None)
        if self._measures:
            self._state.measured(before, step.training)
            self._state.restore(before)
        error = self._of_all_replicas(error)
        if error is None:
            self._tried.add((step.training, step.pieces.total > 1))
        return error

    def compile(self, step: Step) -> None:
        """Compiles this rank's stages for the micro-batches of a step, if it knows their shapes."""
        keys = {rows: key for key, rows in enumerate(step.pieces.sizes)}
        for index, stage in self._stages.items():
            for rows, key in keys.items():
                arrived = [self._messages.shapes(edge, rows) for edge in stage.boundary.receives]
                known = [specs for specs in arrived if specs is not None]
                if len(known) == len(arrived):
                    coming = [spec for specs in known for spec in specs]
                    inputs = [*step.data(index, key), *coming]
                    stage.compile([tf.TensorSpec(t.shape, t.dtype) for t in inputs], step.training)

    def _of_all_replicas(self, error: Exception | None) -> Exception | None:
        """The error of the first replica that has one."""
        everywhere = self._groups.peers.allgather_json(_told(error))
        for ranks, theirs in zip(self._groups.world_ranks, everywhere, strict=True):
            if theirs is not None:
                return error or _error_of(f"A stage of ranks {list(ranks)} cannot run", *theirs)
        return None

    def _try(self, boundary: StageBoundary, step: Step) -> Exception | None:
        """Runs a stage where it is, and passes on what it gives if it can run."""
        owner = self._placement[boundary.index]
        error: Exception | None = None
        outputs: list[tf.Tensor] = []
        if boundary.index in self._stages:
            inputs = [*step.data(boundary.index, 0), *self._arrived.pop(boundary.index, ())]
            try:
                outputs = self._stages[boundary.index].rehearse(step, inputs)
                if self._measures:
                    self._stages[boundary.index].run_once(inputs, step)
            except Exception as caught:
                error = caught
        told = self._communicator.broadcast_json(_told(error), owner)
        if told is not None:
            where = f"Stage {boundary.index} cannot run on rank {owner}"
            return error or _error_of(where, *told)
        values = dict(zip(boundary.outputs, outputs, strict=False))
        for edge in boundary.sends:
            self._pass_on(edge, [values[tensor] for tensor in edge.tensors if values], step)
        return None

    def _pass_on(self, edge: StageEdge, values: list[tf.Tensor], step: Step) -> None:
        """Takes what a stage gives to a later one; it is received before anything else can fail."""
        source, target = self._placement[edge.source], self._placement[edge.target]
        rank = self._communicator.rank
        if rank == source != target:
            self._messages.send(Transfer(edge.source, edge.target, "S", "F", 0), values)
        elif rank == target != source:
            receive = Transfer(edge.source, edge.target, "R", "F", 0)
            self._messages.begin([receive], {0: step.pieces.sizes[0]})
            values = self._messages.receive(receive)
        if rank == target:
            self._arrived[edge.target] += values


def _told(error: Exception | None) -> list[str] | None:
    """An error as other ranks are told of it."""
    return None if error is None else [type(error).__name__, str(error)]


def _error_of(where: str, name: str, text: str) -> Exception:
    """The error of another rank, of its own class if that is one of this library."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TarantellaError):
        return kind(text)
    return UnsupportedModelError(f"{where}. {name}: {text}")
