"""What stages cost: memory, arithmetic and messages, summed up from the nodes of a layer graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.graph.ideals import crossings
from tarantella_pp.partition.graph.layer_graph import (
    LayerGraph,
    Node,
    Tensor,
)
from tarantella_pp.partition.graph.units import sample_shape
from tarantella_pp.partition.optimizer_slots import weight_replicas
from tarantella_pp.partition.peak_memory import (
    GradientSums,
    OutputBytes,
    Users,
    backward_bytes,
    message_bytes,
    output_bytes,
    tie_bytes,
    update_bytes,
)
from tarantella_pp.partition.plan.hardware_spec import (
    BOTH_GRADIENTS,
    HardwareSpec,
    NodeWork,
    node_work,
    roofline_seconds,
)
from tarantella_pp.partition.plan.plan_parts import (
    CutEdge,
    OutputUse,
    StagePlan,
    Tie,
)

# No stage repeats its forward pass.
NOTHING: Mapping[int, int] = MappingProxyType({})
# One replica.
ALONE = GradientSums()


@dataclass(frozen=True, slots=True)
class StageCostModel:
    """A layer graph together with what its costs depend on besides.

    The figures of the nodes are the figures of the graph: to plan with measured ones, put them into
    its nodes (`keeps`, `residual_bytes`, `flops`) and mark them as measured.
    """

    graph: LayerGraph  # the layer graph
    slots: Sequence[int]  # bytes of optimizer state for each variable of the graph
    micro_batch_size: int  # samples of one micro-batch
    # Seconds of each node's forward and backward pass for one micro-batch; `None` where nothing
    # was measured
    seconds: Sequence[tuple[float, float]] | None = None
    micro_batches: int = 1  # micro-batches of a step
    # What loss and metrics need of the model's outputs; `None` where that is not known yet, and
    # not counted
    outputs: OutputUse | None = None
    shards: int = 1  # replicas that share out the optimizer state; 1 where each has all of it
    ranks: Sequence[int] = ()  # rank of each stage in its pipeline; empty where each has its own
    machine: HardwareSpec | None = None  # what computes; `None` where arithmetic alone counts
    # Most micro-batches that a stage has sent and that are not taken; `None` for any
    window: int | None = None
    sums: GradientSums = ALONE  # how gradients are summed over replicas
    # What each node does; `None` to have that counted when it is asked for
    work: Sequence[NodeWork] | None = None
    sent_as: str | None = None  # the type that messages travel in, as a plan has it

    def roofline_seconds(self, samples: float, machine: HardwareSpec) -> list[tuple[float, float]]:
        """Returns the seconds of each node, forward and backward, by arithmetic and traffic."""
        work = node_work(self.graph) if self.work is None else self.work
        return roofline_seconds(work, samples, machine)

    def flops(self) -> npt.NDArray[np.float64]:
        """Returns the FLOPs of each node's forward pass per sample, memory traffic among them.

        That takes as many as the machine could have done meanwhile: in a third of the seconds of
        the pass forward and backward, which is three times as long unless measured otherwise.
        """
        counted = np.array([node.flops for node in self.graph.nodes])
        if self.machine is None or self.machine.memory_bandwidth is None:
            return counted
        rows = self.micro_batch_size
        both = np.array(self.roofline_seconds(rows, self.machine)).sum(axis=1)
        counted = both / (1 + BOTH_GRADIENTS) * (self.machine.flops_per_second / rows)
        return np.asarray(counted)

    def state_bytes(self, weight: int) -> float:
        """Returns the bytes of a variable, its gradient and its optimizer state.

        Of state that is shared out the mean over replicas, which is no more than the largest has.
        """
        return self.copy_bytes(weight) + self.slots[weight] / self.shards

    def copy_bytes(self, weight: int) -> int:
        """Returns the bytes of a variable and its gradient, on a stage that does not train it."""
        found = self.graph.weights[weight]
        return found.bytes * (2 if found.trainable else 1)

    def reduction_bytes(self, share: float | None = None) -> Sequence[float]:
        """Returns the bytes in which each variable travels between replicas."""
        rows = self.micro_batch_size * self.micro_batches
        return self.sums.weight_bytes(
            self.graph, rows, 1 / self.sums.replicas if share is None else share
        )

    def keepers(self) -> dict[int, list[int]]:
        """Returns which nodes need which memory again in their backward pass."""
        found: dict[int, dict[int, None]] = {}
        for node in self.graph.nodes:
            for tensor in node.keeps:
                found.setdefault(self.graph.storage(tensor), {})[node.id] = None
        return {tensor: list(nodes) for tensor, nodes in found.items()}

    def mask_bytes(self, tensor: Tensor) -> int:
        """Returns the bytes of a tensor's mask for one micro-batch; 0 without one."""
        if tensor.mask_shape is None:
            return 0
        return self.micro_batch_size * math.prod(
            sample_shape(tensor.mask_shape, self.graph.assumed_size or 1)
        )

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
            bytes=self.micro_batch_size * tensor.bytes_per_sample,
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

    def stages(
        self,
        assignment: Sequence[int],
        in_flight: Sequence[int],
        repeats: Mapping[int, int] = NOTHING,
    ) -> tuple[StagePlan, ...]:
        """Returns what each stage costs."""
        cuts, users = self.cuts(assignment), self.graph.users(assignment)
        last, replicas = len(in_flight) - 1, self.replicas(users)
        nodes: list[list[int]] = [[] for _ in in_flight]
        for node, stage in enumerate(assignment):
            nodes[stage].append(node)
        found = tuple(
            self.stage(
                nodes[stage], stage, last, (held, repeats.get(stage, 0)), cuts, users, replicas
            )
            for stage, held in enumerate(in_flight)
        )
        return found if self.sums.replicas == 1 else self._with_sums(found, users, replicas)

    def _with_sums(
        self,
        stages: Sequence[StagePlan],
        users: Sequence[tuple[int, ...]],
        replicas: Sequence[int],
    ) -> tuple[StagePlan, ...]:
        """Adds what gradients travel in between replicas, of the replica with most of it."""
        totals = np.zeros((len(stages), self.shards))
        others, own = (self.reduction_bytes(share) for share in (0.0, 1.0))
        for weight, used in enumerate(users):
            if used:
                totals[used[0]] += others[weight]
                totals[used[0], replicas[weight]] += own[weight] - others[weight]
        largest = np.ceil(totals.max(axis=1)).astype(int).tolist()
        return tuple(
            msgspec.structs.replace(stage, reduction_bytes=size)
            for stage, size in zip(stages, largest, strict=True)
        )

    def stage(
        self,
        ids: Sequence[int],
        stage: int,
        last: int,
        held: tuple[int, int],
        cuts: Sequence[CutEdge],
        users: Users,
        replicas: Sequence[int],
    ) -> StagePlan:
        """Returns what one stage costs, but for what gradients travel in between replicas.

        `held` counts its micro-batches, and those of them that it holds all of to run them again.
        """
        in_flight, repeats = held
        nodes = [self.graph.nodes[i] for i in ids]
        used = {w for node in nodes for w in node.weights}
        weights = [self.graph.weights[w] for w in used]
        parameters = sum(weight.bytes for weight in weights if weight.trainable)
        kept, repeated = self._kept_bytes(nodes, again=repeats > 0)
        names = {self.graph.tensors[t].name for t in self._kept(nodes, again=repeats > 0)}
        window = None if self._sends_shapes(cuts, stage) else self.window
        received, sent, returned = message_bytes(
            cuts, stage, in_flight, names, window, self.sent_as
        )
        backward = returned + backward_bytes(self.graph, nodes, self.micro_batch_size)
        own = [weight for weight in weights if users[weight.id][0] == stage]
        shares = [[w for w in own if replicas[w.id] == one] for one in range(self.shards)]
        update = max(update_bytes(self.graph, share, self.slots) for share in shares)
        update -= in_flight * kept + repeats * repeated  # which is gone by then
        made = OutputBytes()
        if self.outputs is not None and stage == last:
            rows, count = self.micro_batch_size, self.micro_batches
            tensors = self._kept(nodes, again=repeats > 0)
            made = output_bytes(self.graph, rows, count, in_flight, self.outputs, tensors)
        end = made.end - in_flight * kept - repeats * repeated
        times = None if self.seconds is None else [self.seconds[i] for i in ids]
        return StagePlan(
            first=nodes[0].name,
            last=nodes[-1].name,
            nodes=len(nodes),
            parameter_bytes=parameters,
            constant_bytes=sum(weight.bytes for weight in weights if not weight.trainable),
            gradient_bytes=parameters,
            optimizer_bytes=max(sum(self.slots[w.id] for w in share) for share in shares),
            activation_bytes=kept,
            in_flight=in_flight,
            buffer_bytes=received + tie_bytes(weights, users, stage),
            flops=sum(node.flops for node in nodes),
            forward_seconds=None if times is None else sum(f for f, _ in times),
            backward_seconds=None if times is None else sum(b for _, b in times),
            recomputed_bytes=repeats * repeated,
            working_bytes=max(
                made.held + max(made.gradients + backward, made.loss), sent, update, end
            ),
        )

    def _sends_shapes(self, cuts: Iterable[CutEdge], stage: int) -> bool:
        """Whether a stage may send messages whose shapes go first, which it does not wait for."""
        return any(cut.source == stage and cut.tensor in self.graph.unsized for cut in cuts)

    def replicas(self, users: Sequence[tuple[int, ...]]) -> Sequence[int]:
        """Returns the replica that updates each variable, as far as that matters."""
        if self.shards == 1:
            return [0] * len(users)
        ranks = self.ranks or range(len(self.graph.nodes))
        positions = [ranks[stages[0]] if stages else 0 for stages in users]
        sizes = [math.prod(weight.shape) for weight in self.graph.weights]
        return weight_replicas(sizes, positions, self.shards)

    def _kept(self, nodes: Sequence[Node], *, again: bool) -> set[int]:
        """Returns the tensors that a stage of these nodes keeps of a micro-batch."""
        if not again:
            return {self.graph.storage(tensor) for node in nodes for tensor in node.keeps}
        return {self.graph.storage(tensor) for tensor in _given(nodes)}

    def _kept_bytes(self, nodes: Sequence[Node], *, again: bool) -> tuple[int, int]:
        """Returns what a stage of these nodes keeps of a micro-batch, and what it makes again."""
        tensors = self.graph.tensors
        kept = self._kept(nodes, again=False)
        inside = math.ceil(self.micro_batch_size * sum(node.residual_bytes for node in nodes))
        if not again:
            return self.micro_batch_size * sum(
                tensors[t].bytes_per_sample for t in kept
            ) + inside, 0
        inputs = self._kept(nodes, again=True)
        given = (tensors[t] for t in _given(nodes))
        masks = sum(self.mask_bytes(one) for one in given if one.producer is not None)
        repeated = (
            self.micro_batch_size * sum(tensors[t].bytes_per_sample for t in kept - inputs) + inside
        )
        return self.micro_batch_size * sum(
            tensors[t].bytes_per_sample for t in inputs
        ) + masks, repeated


def _given(nodes: Sequence[Node]) -> set[int]:
    """Returns the tensors that nodes read and do not make themselves."""
    made = {tensor for node in nodes for tensor in node.outputs}
    return {tensor for node in nodes for tensor in node.inputs} - made
