"""The stages of one rank: tried out, compiled, and run with the messages between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.batch.batch_step import BatchStep
from tarantella_pp.runtime.executor import Executor
from tarantella_pp.runtime.modules.model_outputs import find_activations
from tarantella_pp.runtime.modules.stage_boundary import stage_boundaries, stage_edges
from tarantella_pp.runtime.rehearsal import Rehearsal
from tarantella_pp.runtime.replicas.forward_state import ForwardState
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.stage.gradient_reachability import find_connected_gradients
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage_messages import StageMessages
from tarantella_pp.runtime.tracing.recorder import Recorder
from tarantella_pp.schedule import Schedule, send_window


class RankStages(Mapping[int, Stage]):
    """This rank's stages, by their numbers.

    Attributes:
        boundaries: The borders of all stages of the model.
        edges: What crosses from stage to stage, of all ranks.
        modules: What each stage of this rank computes with.
        rehearsal: Tries the stages out before they first run.
        have_run: Whether stages have been traced, with their layers as they were.
    """

    def __init__(
        self,
        extracted: ExtractedModel,
        plan: Plan,
        placement: Sequence[int],
        groups: ProcessGroups,
        *,
        micro_batches: int,
    ) -> None:
        graph, ranks = extracted.graph, groups.pipeline
        self._groups = groups
        self._placement = placement
        self.boundaries = stage_boundaries(
            graph, plan.assignment, plan.num_stages, find_activations(extracted)
        )
        self.edges = stage_edges(self.boundaries)
        self._own = {
            boundary.index: Stage(
                boundary,
                [extracted.calls[node] for node in boundary.nodes],
                recompute=boundary.index in plan.recompute,
                micro_batches=micro_batches,
                num_replicas=groups.num_replicas,
            )
            for boundary in self.boundaries
            if placement[boundary.index] == ranks.rank
        }
        self.modules = {index: stage.module for index, stage in self._own.items()}
        messages = StageMessages(ranks, graph, self.edges, placement, wire_dtype=plan.wire_dtype)
        self._executor = Executor(self._own, messages, Recorder(1), plan.except_last)
        self._forward_state = ForwardState(
            [call for module in self.modules.values() for call in module.layer.calls],
            [module.statistics for module in self.modules.values()],
            groups.peers,
        )
        self.rehearsal = Rehearsal(
            self.boundaries, self._own, messages, placement, groups, self._forward_state
        )
        self.have_run = False

    def __getitem__(self, index: int) -> Stage:
        return self._own[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    @property
    def recorder(self) -> Recorder:
        """Where it is noted what they do when."""
        return self._executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        """Has it noted elsewhere."""
        self._executor.recorder = recorder

    def rehearse(self, step: BatchStep) -> Exception | None:
        """Tries the stages of all ranks out; see `Rehearsal.run`."""
        self.have_run = True
        return self.rehearsal.run(step)

    def run(self, schedule: Schedule, batch: Batch, step: BatchStep) -> None:
        """Runs this rank's actions of a schedule."""
        self.have_run = True
        step.begin()
        self._forward_state.begin(batch.share, step.training)
        window = send_window(schedule.name, schedule.num_stages, schedule.num_ranks)
        program = schedule.actions[self._groups.pipeline.rank]
        self._executor.run(program, step.rows, step, window)
        self._forward_state.end(batch.shares, step.training)

    def clear(self) -> None:
        """Drops what is left of a step that an error has ended."""
        self._executor.clear()
        for stage in self._own.values():
            stage.clear()

    def find_reach(self, scored: Iterable[int]) -> None:
        """Learns which weights no gradient reaches; collective, after a training step."""
        find_connected_gradients(
            self.boundaries, self._own, self._placement, self._groups.pipeline, scored
        )

    def find_fallbacks(self) -> dict[int, str]:
        """Returns which stages of any rank could not be cut, and why; all ranks must call it."""
        mine = {str(i): stage.fallback for i, stage in self._own.items() if stage.fallback}
        everywhere = self._groups.pipeline.allgather_json(mine)
        return {int(i): reason for theirs in everywhere for i, reason in theirs.items()}

    def first_shapes(self) -> dict[str, Any]:
        """What the stages were compiled for first, by replica and stage."""
        return {
            f"{self._groups.replica}.{index}": stage.first_shapes
            for index, stage in self._own.items()
        }

    def begin_with(self, shapes: Mapping[str, Any]) -> None:
        """Compiles the stages as they were in a run that goes on here."""
        for index, stage in self._own.items():
            known = shapes.get(f"{self._groups.replica}.{index}")
            if known:
                stage.begin_with(known)
