"""The stages of one rank: tried out, compiled, and run with the messages between them."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.internals.functional import sublayers
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.runtime.batch import Batch
from tarantella_pp.runtime.batch_step import BatchStep
from tarantella_pp.runtime.comm.collective import on_all_ranks, on_one_rank
from tarantella_pp.runtime.comm.process_groups import ReplicaExchange, refuse_unlike
from tarantella_pp.runtime.executor import Executor, Recorder
from tarantella_pp.runtime.probes.stage_probe import StageProbe
from tarantella_pp.runtime.stage import stage_boundary
from tarantella_pp.runtime.stage.forward_state import ForwardState
from tarantella_pp.runtime.stage.model_outputs import find_activations
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage.stage_messages import StageMessages
from tarantella_pp.runtime.weights.rank_weights import PlacedModel
from tarantella_pp.runtime.weights.remote_variables import is_remote, is_stale
from tarantella_pp.schedule import Transfer


class RankStages(dict[int, Stage]):
    """This rank's stages, by their numbers."""

    def __init__(self, placed: PlacedModel) -> None:
        super().__init__()
        extracted, plan, groups = placed.extracted, placed.plan, placed.groups
        graph, ranks = extracted.graph, groups.pipeline
        self._groups = groups
        self._placement = placement = placed.placement
        self.boundaries = stage_boundary.stage_boundaries(
            graph, plan.assignment, plan.num_stages, find_activations(extracted)
        )
        self.edges = stage_boundary.stage_edges(self.boundaries)
        for i, boundary in enumerate(self.boundaries):
            if placement[i] == ranks.rank:
                calls = [extracted.calls[node] for node in boundary.nodes]
                self[i] = Stage(boundary, calls, plan.prices(i, boundary.nodes))
        self.modules = {index: stage.module for index, stage in self.items()}
        # For each stage, of this rank or of others, the places of the model inputs that it uses.
        self.model_inputs = [
            [graph.inputs.index(used.tensor) for used in boundary.model_inputs]
            for boundary in self.boundaries
        ]
        self.exchange = ReplicaExchange(groups.peers)
        # One stage, one process and one micro-batch: plain Keras, where anything goes.
        self._is_plain = groups.world.size == 1 and len(self.boundaries) == 1
        for module in self.modules.values():
            module.statistics.waits = placed.num_micro_batches > 1 or not self._is_plain
        self.probes = {
            i: StageProbe(
                module,
                functools.partial(_weights_past, extracted, module.boundary.nodes),
                functools.partial(_following, graph),
                groups.num_replicas,
                self._is_plain,
            )
            for i, module in self.modules.items()
        }
        messages = StageMessages(ranks, graph, self.edges, placement, sent_as=plan.wire_dtype)
        self.executor = Executor(self, messages, Recorder(1))
        self._forward_state = ForwardState(
            [call for module in self.modules.values() for call in module.layer.calls],
            [module.statistics for module in self.modules.values()],
            self.exchange,
        )
        # Tensors of other graphs that layers have kept of their last call, when they were read
        attributes = [(vars(p), *x) for p in sublayers(extracted.model) for x in vars(p).items()]
        self._kept = [given for given in attributes if tf.is_symbolic_tensor(given[2])]
        self.have_run = False
        self._messages = messages
        self._measures = False
        self._tried: set[tuple[bool, bool]] = set()
        self._arrived: dict[int, list[tf.Tensor]] = defaultdict(list)

    def forget_kept(self) -> None:
        """Lets no graph take in what layers may have kept of calls of the user's since."""
        for attributes, name, tensor in self._kept:
            if isinstance(attributes.get(name), tf.Tensor):
                attributes[name] = tensor

    def is_due(self, training: bool, batch: Batch) -> bool:
        """Whether steps of a kind are yet to be tried out."""
        several = len(batch.share.sizes) > 1
        return (training, several) not in self._tried and (several or not self._is_plain)

    def rehearse(self, step: BatchStep) -> None:
        """Runs the first micro-batch forward: what can fail fails here, on all ranks alike."""
        self.have_run = True
        self._arrived.clear()
        self.forget_kept()

        def run() -> None:
            trials = [trial for each in self.boundaries for trial in self._trace(each, step)]
            while trials:  # they take long: on all ranks at once; each frees its memory
                trials.pop(0)()

        with self._forward_state.measuring(step.training) as self._measures:
            on_all_ranks(self._groups.world, "run its stages", run)
        refuse_unlike(self._groups, [x for probe in self.probes.values() for x in probe.constants])
        self._tried.add((step.training, len(step.batch.share.sizes) > 1))

    def _trace(
        self, boundary: stage_boundary.StageBoundary, step: BatchStep
    ) -> list[Callable[[], object]]:
        """Traces a stage where it is, and passes on what it gives; returns its trials."""
        index = boundary.index
        outputs: list[tf.Tensor] = []
        trials: list[Callable[[], object]] = []

        def run() -> list[tuple[str, Sequence[int]]]:
            inputs = [*step.data(index, 0), *self._arrived.pop(index, ())]
            outputs[:], trial = self.probes[index].examine(
                step.sizes[0], len(step.batch.share.sizes), inputs,
                lambda: (step.data(index, i) for i in range(1, len(step.sizes))),
                training=step.training,
            )  # fmt: skip
            trials.append(trial)
            if self._measures:
                trials.append(lambda: self[index].run_once(inputs, step.share(0), step.training))
            elif step.training:  # traced on all ranks at once, too
                trials.append(lambda: self[index].passes.for_inputs(inputs))
            return [(output.dtype.name, output.shape.as_list()) for output in outputs]

        made = on_one_rank(self._groups.pipeline, self._placement[index], f"run stage {index}", run)
        values = dict(zip(boundary.outputs, outputs, strict=False))
        # Layers may make others than they say: dtypes, as Keras' IntegerLookup, or shapes where
        # they do not train, as RandomCrop.
        self._messages.learn(dict(zip(boundary.outputs, made, strict=False)), step.sizes[0])
        # Messages go only after all ranks know that the stage can run: none is left under way.
        for edge in boundary.sends:
            self._pass_on(edge, [values[tensor] for tensor in edge.tensors if values], step)
        return trials

    def _pass_on(
        self, edge: stage_boundary.StageEdge, values: list[tf.Tensor], step: BatchStep
    ) -> None:
        """Takes what a stage gives to a later one; it is received before anything else can fail."""
        source, target = self._placement[edge.source], self._placement[edge.target]
        rank = self._groups.pipeline.rank
        if rank == source != target:
            self._messages.begin([], step.sizes)
            self._messages.send(Transfer(edge.source, edge.target, "S", "F", 0), values)
        elif rank == target != source:
            receive = Transfer(edge.source, edge.target, "R", "F", 0)
            self._messages.begin([receive], step.sizes)
            values = self._messages.receive(receive)
        if rank == target:
            self._arrived[edge.target] += values

    @contextlib.contextmanager
    def begun(self, step: BatchStep) -> Iterator[Executor]:
        """Surrounds a step: what layers and metrics keep is the batch's before it and after it."""
        self.have_run = True
        step.begin()
        self._forward_state.begin(step.batch.share.first, step.training)
        yield self.executor  # not called from here: deep stacks are hard to read
        self._forward_state.end([share.count for share in step.batch.shares], step.training)

    def clear(self) -> None:
        """Drops the rest of a step that an error has ended."""
        self.executor.clear()
        for stage in self.values():
            stage.clear()

    def find_reach(self, scored: Iterable[int]) -> None:
        """Learns, after a training step, which weights no gradient reaches; all must call it.

        Keras leaves a weight alone that no gradient reaches, where a gradient of zero would let it
        decay. A stage by itself cannot tell the two apart: what comes back over a cut may be zeros
        only because a later stage, or the loss, does not use it.
        """
        ranks = self._groups.pipeline
        # Pairs of a stage that sends a gradient back, -1 for the loss, and a tensor.
        connected = {(-1, t) for t in ranks.broadcast_json(list(scored), self._placement[-1])}
        for boundary in reversed(self.boundaries):
            coming = [
                (boundary.model_outputs != () and (-1, tensor.tensor) in connected)
                or any((edge.target, tensor.tensor) in connected for edge in boundary.sends)
                for tensor in boundary.outputs_with_gradient
            ]
            stage = self.get(boundary.index)
            reached = None if stage is None else stage.reached(coming)
            reached = ranks.broadcast_json(reached, self._placement[boundary.index])
            connected |= {
                (boundary.index, tensor.tensor)
                for tensor, is_reached in zip(boundary.input_gradients, reached, strict=True)
                if is_reached
            }

    def find_fallbacks(self) -> dict[int, str]:
        """Returns which stages of any rank could not be cut, and why; all ranks must call it."""
        mine = {i: stage.passes.fallback for i, stage in self.items() if stage.passes.fallback}
        everywhere = self._groups.pipeline.allgather_json(mine)
        return {i: reason for theirs in everywhere for i, reason in theirs.items()}


def _following(graph: LayerGraph, tensor: int) -> set[int]:
    """The tensors of a model that follow from one."""
    found = {tensor}
    for node in graph.nodes:  # in order
        found.update(() if found.isdisjoint(node.inputs) else node.outputs)
    return found


def _weights_past(extracted: ExtractedModel, nodes: Sequence[int]) -> list[Any]:
    """The weights that a stage has no layer of, and that can be read here."""
    own = {id(w) for node in nodes for w in extracted.calls[node].variables}
    return [
        variable
        for variable, facts in zip(extracted.variables, extracted.graph.weights, strict=True)
        if (facts.trainable or facts.stateful or is_remote(variable))
        and id(variable) not in own
        and not is_stale(variable)
    ]
