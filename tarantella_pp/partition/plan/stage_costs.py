"""What stages cost: memory, arithmetic and messages, summed up from the nodes of a layer graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.graph.ideals import crossings
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node, Tensor, Weight
from tarantella_pp.partition.graph.units import sample_shape
from tarantella_pp.partition.plan import peak_memory
from tarantella_pp.partition.plan.gradient_buckets import weight_replicas
from tarantella_pp.partition.plan.hardware_spec import (
    BOTH_GRADIENTS,
    HardwareSpec,
    NodeWork,
    roofline_seconds,
)
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import CutEdge, OutputUse, PlanConfig, StagePlan, Tie
from tarantella_pp.schedule import HeldAgain


@dataclass(frozen=True)
class StageCostModel:
    """A layer graph together with what its costs depend on besides."""

    graph: LayerGraph  # the layer graph
    slots: Sequence[int]  # bytes of optimizer state for each variable of the graph
    config: PlanConfig  # micro-batches, replicas, and what travels between them
    # Seconds of each node's forward and backward pass for one micro-batch; `None` where nothing
    # was measured
    seconds: Sequence[tuple[float, float]] | None = None
    # What loss and metrics need of the model's outputs; `None` where that is not known yet, and
    # not counted
    outputs: OutputUse | None = None
    machine: HardwareSpec | None = None  # what computes; `None` where arithmetic alone counts
    work: Sequence[NodeWork] = ()  # what each node does, of which FLOPs are counted
    in_flight: Sequence[int] = ()  # most micro-batches that each stage holds at a time
    # For how many micro-batches each stage holds what its B made for its W, or what it made again;
    # not counted if empty
    held_again: Sequence[HeldAgain] = ()

    @cached_property
    def rows(self) -> int:
        """Samples of one micro-batch."""
        return self.config.micro_batch_size

    @cached_property
    def keeping(self) -> LayerGraph:
        """The graph, with what its nodes keep of stages that make nothing again."""
        worth, count = self.config.flops_per_byte, len(self.graph.nodes)
        return self.graph.keeping((worth,) * count) if worth else self.graph

    @cached_property
    def repeating(self) -> LayerGraph:
        """The graph, with what its nodes keep of stages that do."""
        worth = self.config.recompute_worth or (math.inf,) * len(self.graph.nodes)
        return self.graph.keeping(worth)

    @cached_property
    def _backward(self) -> peak_memory.BackwardPass:
        return peak_memory.BackwardPass(self.graph)

    @cached_property
    def _cheap(self) -> peak_memory.Missing:
        return peak_memory.Missing(self.graph, self.keeping)

    @cached_property
    def _dear(self) -> peak_memory.Missing:
        return peak_memory.Missing(self.graph, self.repeating)

    @cached_property
    def reduced(self) -> list[list[float]]:
        """Bytes in which each variable travels between replicas, where another trains it or not."""
        return [peak_memory.reduction_bytes(self.graph, self.config, one) for one in (0.0, 1.0)]

    def flops(self) -> npt.NDArray[np.float64]:
        """Returns the FLOPs of each node, per sample, with traffic, less what nobody needs."""
        if self.machine is None or self.machine.memory_bandwidth is None:
            passes = np.array([1 + sum(one.gradients) for one in self.work])
            return passes / (1 + BOTH_GRADIENTS) * [node.flops for node in self.graph.nodes]
        both = np.array(roofline_seconds(self.work, self.rows, self.machine)).sum(axis=1)
        counted = both / (1 + BOTH_GRADIENTS) * (self.machine.flops_per_second / self.rows)
        return np.asarray(counted)

    def mask_bytes(self, tensor: Tensor) -> int:
        """Returns the bytes of a tensor's mask for one micro-batch; 0 without one."""
        if tensor.mask_shape is None:
            return 0
        shape = sample_shape(tensor.mask_shape, self.graph.assumed_size or 1)
        return self.rows * math.prod(shape)

    def cuts(self, assignment: Sequence[int]) -> tuple[CutEdge, ...]:
        """Returns the tensors that are sent between stages."""
        return tuple(self.cut(*one) for one in crossings(self.graph, assignment))

    def cut(self, tensor: Tensor, source: int, targets: tuple[int, ...]) -> CutEdge:
        """Returns what it costs to send a tensor."""
        return CutEdge(
            tensor=tensor.name,
            source=source,
            targets=targets,
            dtype=tensor.dtype,
            bytes=self.rows * tensor.bytes_per_sample,
            has_gradient=tensor.has_gradient,
            mask_bytes=self.mask_bytes(tensor),
        )

    def ties(self, assignment: Sequence[int]) -> tuple[Tie, ...]:
        """Returns the trainable variables that several stages use."""
        pairs = zip(self.graph.weights, self.graph.users(assignment), strict=True)
        return tuple(
            Tie(weight.name, stages, weight.bytes)
            for weight, stages in pairs
            if weight.trainable and len(stages) > 1
        )

    def stages(self, assignment: Sequence[int]) -> tuple[StagePlan, ...]:
        """Returns what each stage costs."""
        cuts, users = self.cuts(assignment), self.graph.users(assignment)
        nodes: list[list[int]] = [[] for _ in self.in_flight]
        for node, stage in enumerate(assignment):
            nodes[stage].append(node)
        return tuple(self.stage(own, stage, cuts, users)[0] for stage, own in enumerate(nodes))

    def stage(
        self, ids: Sequence[int], stage: int, cuts: Sequence[CutEdge], users: peak_memory.Users
    ) -> tuple[StagePlan, int]:
        """Returns what one stage costs, and bytes besides state that all around it have, too."""
        graph, rows, in_flight = self.graph, self.rows, self.in_flight[stage]
        nodes = [graph.nodes[i] for i in ids]
        weights = [graph.weights[w] for w in sorted({w for node in nodes for w in node.weights})]
        parameters = sum(weight.bytes for weight in weights if weight.trainable)
        kept, size, whole, least = self._kept(ids, again=self.config.recomputes(stage))
        received, sent, returned = self._messages(cuts, stage, kept)
        repeated = max(0, whole - size)
        again, share, backward = self._again(ids, stage, repeated)
        shared = in_flight * least + again + backward
        waiting = self._waiting_for_w(ids, stage, cuts)
        # While one runs backward, the others wait for their W.
        others = self.held_again[stage].micro_batches - 1 if waiting else 0
        backward += returned + others * waiting
        own = [weight for weight in weights if users[weight.id][0] == stage]
        shares = self._shares(own)
        gone = in_flight * size + again  # at the end of a step
        update = max(peak_memory.update_bytes(graph, share, self.slots) for share in shares) - gone
        made = peak_memory.OutputBytes()
        if self.outputs is not None and stage == len(self.in_flight) - 1:
            count = self.config.num_micro_batches
            made = peak_memory.output_bytes(graph, rows, count, in_flight, self.outputs, kept)
        times = None if self.seconds is None else [self.seconds[i] for i in ids]
        costs = StagePlan(
            first=nodes[0].name,
            last=nodes[-1].name,
            nodes=len(nodes),
            parameter_bytes=parameters,
            constant_bytes=sum(weight.bytes for weight in weights if not weight.trainable),
            gradient_bytes=parameters,
            optimizer_bytes=max(sum(self.slots[w.id] for w in share) for share in shares),
            activation_bytes=size,
            in_flight=in_flight,
            buffer_bytes=received + peak_memory.tie_bytes(weights, users, stage),
            flops=sum(node.flops for node in nodes),
            forward_seconds=None if times is None else sum(f for f, _ in times),
            backward_seconds=None if times is None else sum(b for _, b in times),
            recomputed_bytes=again,
            repeated_bytes=repeated,
            repeated=share,
            working_bytes=max(
                made.held + max(made.gradients + backward, made.loss), sent, update, made.end - gone
            ),
            waiting_bytes=waiting,
            reduction_bytes=self._reduction_bytes(own, shares),
        )
        return costs, shared

    def _shares(self, weights: Sequence[Weight]) -> list[list[Weight]]:
        """Returns the variables of a stage, in their order, that each replica updates."""
        if self.config.shards == 1:
            return [list(weights)]
        shares: list[list[Weight]] = [[] for _ in range(self.config.shards)]
        sizes = [math.prod(weight.shape) for weight in weights]
        owners = weight_replicas(sizes, [0] * len(sizes), len(shares))
        for weight, owner in zip(weights, owners, strict=True):
            shares[owner].append(weight)
        return shares

    def _reduction_bytes(self, own: Sequence[Weight], shares: Sequence[Sequence[Weight]]) -> int:
        """Returns what gradients travel in between replicas, of the replica with most of it."""
        elsewhere, here = self.reduced
        most = max(sum(here[w.id] - elsewhere[w.id] for w in share) for share in shares)
        return math.ceil(sum(elsewhere[w.id] for w in own) + most)

    def _messages(
        self, cuts: Sequence[CutEdge], stage: int, kept: set[int]
    ) -> tuple[int, int, int]:
        """Returns the memory of messages; see `message_bytes`."""
        names = {self.graph.tensors[t].name for t in kept}
        # Messages whose shapes go first are not waited for.
        shapes = any(cut.source == stage and cut.tensor in self.graph.unsized for cut in cuts)
        window, in_flight = None if shapes else self.config.send_window, self.in_flight[stage]
        return peak_memory.message_bytes(cuts, stage, in_flight, names, self.config.sent, window)

    def _again(self, ids: Sequence[int], stage: int, repeated: int) -> tuple[int, float, int]:
        """Returns bytes that recomputing adds, its share of the forward, and bytes of a B."""
        # What runs again for later operations is there for its own gradient, too: nothing of it is
        # made a third time. Cheap results do in all stages.
        usual = self._backward.bytes(ids, self.rows, self._cheap)
        if not self.config.recomputes(stage):
            return 0, 0.0, usual
        again = [self.repeating.nodes[i] for i in ids]
        times = [node.flops if self.seconds is None else self.seconds[node.id][0] for node in again]
        parts = [seconds * node.repeated for seconds, node in zip(times, again, strict=True)]
        share = min(1.0, sum(parts) / sum(times)) if sum(times) else 1.0
        # Until their W is done it is there of those whose B is, or whose R.
        count, is_whole = self.held_again[stage]
        if is_whole:
            return count * repeated, share, usual
        more = self._backward.bytes(ids, self.rows, self._dear)
        return (count - 1) * repeated + max(0, more - usual), share, min(more, usual)

    def _waiting_for_w(self, ids: Sequence[int], stage: int, cuts: Sequence[CutEdge]) -> int:
        """Returns bytes of gradients of products that a B leaves to its W."""
        has_b = any(cut.has_gradient and stage in cut.targets for cut in cuts)  # else W does it all
        if not self.held_again or not has_b:
            return 0
        return math.ceil(self.rows * sum(self._left_to_w[i] for i in ids))

    @cached_property
    def _left_to_w(self) -> list[float]:
        """Bytes of a sample of the gradients of what each node makes by products with weights."""

        def of(node: Node) -> float:
            if not any(self.graph.weights[weight].trainable for weight in node.weights):
                return 0.0
            # One that reads two values is none with a weight, as attention's.
            products = (one for one in node.operations if one.dear and len(one.reads) == 1)
            return sum(size for one in products for _, size in one.makes)

        return [*map(of, self.graph.nodes)]

    @cached_property
    def _storage(self) -> list[int]:
        return [self.graph.storage(tensor.id) for tensor in self.graph.tensors]

    @cached_property
    def _touched(self) -> tuple[list[set[int]], ...]:
        """The tensors that each node makes and reads, and storage that it reads and keeps."""
        nodes, storage = self.graph.nodes, self._storage
        return (
            [set(node.outputs) for node in nodes],
            [set(node.inputs) for node in nodes],
            [{storage[tensor] for tensor in node.inputs} for node in nodes],
            [{storage[tensor] for tensor in node.keeps} for node in nodes],
        )

    def _kept(self, ids: Sequence[int], *, again: bool) -> tuple[set[int], int, int, int]:
        """Returns what a micro-batch keeps, its bytes, those without recomputing, and the least."""
        graph = self.graph
        made, given, used, read = (set[int]().union(*(s[i] for i in ids)) for s in self._touched)
        given -= made
        inputs = {self._storage[tensor] for tensor in given}

        def of(keeping: LayerGraph) -> tuple[set[int], int]:
            """Other stages keep what this one hands on."""
            own = [keeping.nodes[i] for i in ids]
            kept = {self._storage[tensor] for node in own for tensor in node.keeps}
            inside = math.ceil(self.rows * sum(node.residual_bytes for node in own))
            return kept & (used | read), inside

        def size(kept: set[int], inside: int) -> int:
            return inside + self.rows * sum(graph.tensors[t].bytes_per_sample for t in kept)

        # It cannot make its inputs again, as stages around it may.
        cheap, inside = of(self.keeping)
        usual = cheap | (read & inputs)
        whole = size(usual, inside)
        if not again:
            return usual, whole, whole, size(cheap, inside)
        kept, inside = of(self.repeating)
        received = (graph.tensors[t] for t in given)
        masks = sum(self.mask_bytes(one) for one in received if one.producer is not None)
        least = size(kept - inputs, inside)
        return kept | inputs, size(kept | inputs, inside) + masks, whole, least


# What grows with batches and messages.
_GROWING = (
    *("activation_bytes", "recomputed_bytes", "repeated_bytes", "working_bytes", "waiting_bytes"),
    *("buffer_bytes", "reduction_bytes"),  # the latter: of rows that are looked up in embeddings
)


def with_batch(
    plan: Plan,
    graph: LayerGraph,
    batch_size: int,
    outputs: OutputUse,
    in_flight: Sequence[int] | None = None,
) -> Plan:
    """Returns a plan for another batch; with `in_flight` all forward passes come first."""
    # What the rules say of the change comes on top of the plan's own figures: they may be measured.
    longer = batch_size / plan.batch_size
    gpipe: dict[str, Any] = {}
    if in_flight is not None:
        gpipe = {"schedule": "gpipe", "schedule_text": None, "in_bubbles": ()}
    changed = msgspec.structs.replace(plan, batch_size=batch_size, outputs=outputs, **gpipe)
    slots = [2 * weight.bytes * weight.trainable for weight in graph.weights]  # Adam's
    planned = [stage.in_flight for stage in plan.stages]
    before, now = (
        StageCostModel(graph, slots, p, outputs=p.outputs, in_flight=held, held_again=p.held_again)
        for p, held in ((plan, planned), (changed, in_flight or planned))
    )
    stages, both = [], [costs.stages(plan.assignment) for costs in (before, now)]
    for stage, old, new in zip(plan.stages, *both, strict=True):
        more = {name: getattr(new, name) - getattr(old, name) for name in _GROWING}
        sizes: dict[str, Any] = {
            name: max(0, getattr(stage, name) + size) for name, size in more.items()
        }
        if stage.forward_seconds is not None and stage.backward_seconds is not None:  # measured
            sizes["forward_seconds"] = longer * stage.forward_seconds
            sizes["backward_seconds"] = longer * stage.backward_seconds
        stages.append(msgspec.structs.replace(stage, in_flight=new.in_flight, **sizes))
    return msgspec.structs.replace(changed, stages=tuple(stages), cuts=now.cuts(plan.assignment))
