"""What a stage has in memory besides state: gradients, messages, temporaries, sums of replicas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tarantella_pp.partition.graph.ideals import Array
from tarantella_pp.partition.graph.layer_graph import LOOKUPS, LayerGraph, Weight
from tarantella_pp.partition.graph.units import item_bytes, wire_bytes
from tarantella_pp.partition.plan.plan_parts import CutEdge, OutputUse, PlanConfig

# Variables whose update TensorFlow has begun and not ended at a time, at the most: it goes on with
# one of the operations that are ready and leaves the others for later.
AT_ONCE = 5
# Gradients of micro-batches that the last stage has sent and the one before not yet fetched.
ON_THEIR_WAY = 2
# Tensors of a variable's size that Keras makes for each slot where the gradient is sparse: three
# or four for the two of Adam, as it happens.
DENSE_COPIES = 1.75
# Share of what an operation keeps inside that its gradients there need at a time: operations that
# keep something there, such as attention and loops, keep about eight tensors, and kept ones go as
# gradients come, so that there are two of these at most.
INSIDE = 0.25
# Tensors of the outputs' size that a loss and its gradient make for a moment.
LOSS_COPIES = 2

# The stages that use each variable, ascending.
Users = Sequence[tuple[int, ...]] | Mapping[int, tuple[int, ...]]


class OutputBytes(NamedTuple):
    """Memory of a model's outputs on the last stage."""

    held: int = 0  # outputs of micro-batches that wait for their backward pass or for metrics
    loss: int = 0  # what the loss makes of them for a moment
    gradients: int = 0  # gradients of the whole batch, which are made at once
    end: int = 0  # what metrics make of them at the end of a step, when activations are gone


def output_bytes(
    graph: LayerGraph, rows: int, micro_batches: int, in_flight: int, use: OutputUse, kept: set[int]
) -> OutputBytes:
    """Counts the memory of outputs on the last stage."""
    tensors = dict.fromkeys(graph.storage(tensor) for tensor in graph.outputs)
    size = rows * sum(graph.tensors[t].bytes_per_sample for t in tensors)
    counted = rows * sum(graph.tensors[t].bytes_per_sample for t in tensors if t in kept)
    there = in_flight + use.metrics  # those of one micro-batch, at the most, wait for metrics
    if use.at_once is not None:
        there = micro_batches
    held = min(there, micro_batches) * size - min(in_flight, micro_batches) * counted
    whole = micro_batches * size * (micro_batches > 1)  # in one piece, a copy
    if use.loss_at_once is None:
        at_end = held + whole if use.metrics_at_once else 0
        return OutputBytes(max(0, held), LOSS_COPIES * size, 0, at_end)
    loss = whole + LOSS_COPIES * micro_batches * size
    return OutputBytes(max(0, held), loss, micro_batches * size, held + whole)


class BackwardPass:
    """Plays the backward pass of a stage for one micro-batch, operation by operation.

    The gradient of a tensor is there from when the last of its readers runs backward until its
    producer has, the gradient of a weight until it is added to its sum. Kept activations
    go with the last operation that needs them.
    """

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        nodes = graph.nodes
        made = self._flows([node.outputs for node in nodes], gradients=True)
        given = self._flows([node.inputs for node in nodes], gradients=True)
        kept = self._flows([node.keeps for node in nodes], gradients=False)
        outputs = [set(map(graph.storage, node.outputs)) for node in nodes]
        # Tensor, node, bytes, and whether the node makes it: of each tensor the first comes first.
        comes = [(*one, 1) for one in made] + [(*one, 0) for one in given]
        comes.sort(key=lambda one: (one[0], -one[1], -one[3]))
        goes = sorted((*one, int(one[0] in outputs[one[1]])) for one in kept)
        ends = sorted((*one, 1) for one in made)
        self._comes, self._goes, self._ends = (
            np.array(all_, int).reshape(-1, 4) for all_ in (comes, goes, ends)
        )
        makers = {node for _, node, _ in made}
        self._weights = np.array([node.parameters * (node.id in makers) for node in nodes])
        self._inside = np.array([node.residual_bytes for node in nodes])

    def _flows(
        self, tensors: Iterable[Sequence[int]], *, gradients: bool
    ) -> list[tuple[int, int, int]]:
        graph = self._graph
        found = [
            (graph.tensors[tensor], node)
            for node, own in enumerate(tensors)
            for tensor in dict.fromkeys(map(graph.storage, own))
        ]
        return [(t.id, n, t.bytes_per_sample) for t, n in found if t.has_gradient or not gradients]

    def bytes(self, nodes: Sequence[int], rows: int, missing: Missing | None = None) -> int:
        """Returns the most that is there at a time.

        What is missing is made when the first operation needs it, with all that leads there.
        """
        count, order = len(self._graph.nodes), np.array(nodes)[::-1]
        there = np.zeros(count, bool)
        there[order] = True

        def firsts(entries: npt.NDArray[np.int_]) -> list[Array]:
            """Returns what the first entries of all tensors add up to: of others, of makers."""
            own = entries[there[entries[:, 1]]]
            own = own[np.append(True, own[1:, 0] != own[:-1, 0])[: len(own)]]
            parts = [own[own[:, 3] == flag] for flag in (0, 1)]
            return [np.bincount(one[:, 1], one[:, 2], count)[order] for one in parts]

        # The gradient of an activation function is written over its result.
        freed, results = firsts(self._goes)
        more = rows * (sum(firsts(self._comes)) - results)
        if missing is not None:
            more = more + rows * np.array(missing.made_for(order.tolist()))
        inside = rows * self._inside[order]
        gone = rows * (sum(firsts(self._ends)) + freed) + inside
        before = np.concatenate([[0.0], np.cumsum(more - gone)[:-1]])
        most = (before + more + self._weights[order] + INSIDE * inside).max()
        return math.ceil(max(0.0, float(most)))


class Missing:
    """What stages of a graph whose nodes keep less do not keep of what backward passes need."""

    def __init__(self, graph: LayerGraph, again: LayerGraph) -> None:
        def stored(tensors: Iterable[int]) -> set[int]:
            return set(map(graph.storage, tensors))

        there = set[int]().union(*(stored(node.keeps) for node in again.nodes))
        needed = set[int]().union(*(stored(node.keeps) for node in graph.nodes))
        self._makers = {t: n.id for n in graph.nodes for t in stored(n.outputs) - there}
        self._sizes: dict[int, float] = {
            t: graph.tensors[t].bytes_per_sample if t in needed else 0 for t in self._makers
        }
        missing = set(self._makers)
        self._needed = [missing & stored(node.keeps) for node in graph.nodes]
        self._read = [missing & stored(node.inputs) for node in graph.nodes]
        for usual, one in zip(graph.nodes, again.nodes, strict=True):
            # What it has inside is a value that it makes with all others.
            if (size := usual.residual_bytes - one.residual_bytes) > 0:
                inside = -1 - usual.id
                self._makers[inside], self._sizes[inside] = usual.id, size
                self._needed[usual.id].add(inside)
                self._read[usual.id].add(inside)

    def made_for(self, nodes: Sequence[int]) -> list[float]:
        """Bytes of a sample that are made for the backward pass of nodes, one after the other.

        Without its inputs a stage, which has these nodes, makes nothing again.
        """
        there, made = set(nodes), set[int]()

        def of(node: int) -> float:
            size, todo = 0.0, [*self._needed[node]]
            while todo:
                value = todo.pop()
                if value not in made and (maker := self._makers[value]) in there:
                    made.add(value)
                    size += self._sizes[value]
                    todo += self._read[maker]
            return size

        return [*map(of, nodes)]


def update_bytes(graph: LayerGraph, weights: Iterable[Weight], slots: Sequence[int]) -> int:
    """Counts what the optimizer makes while it updates weights."""
    sparse = graph.looked_up
    trainable = [weight for weight in weights if weight.trainable]
    dense = sorted((weight.bytes for weight in trainable if weight.id not in sparse), reverse=True)
    slices = sum(slots[weight.id] for weight in trainable if weight.id in sparse)
    return min(sum(dense), AT_ONCE * max(dense, default=0)) + math.ceil(DENSE_COPIES * slices)


def tie_bytes(weights: Iterable[Weight], users: Users, stage: int) -> int:
    """Counts what arrives once a step for variables that several stages use, and is kept."""
    tied = [w for w in weights if w.trainable and len(users[w.id]) > 1]
    return sum(w.bytes * (len(users[w.id]) - 1 if users[w.id][0] == stage else 1) for w in tied)


def message_bytes(
    cuts: Iterable[CutEdge],
    stage: int,
    in_flight: int,
    kept: Container[str],
    bytes_sent: Callable[[CutEdge], int],
    window: int | None = None,
) -> tuple[int, int, int]:
    """Counts the memory of messages.

    The next receive is posted ahead; what has arrived is there while it is used, or longer where
    it is kept. What has been sent stays until it is received: activations until their gradient
    comes back, at the latest, and no more of them than a window and the next. Gradients are gone
    when the next ones are made, because a stage that waits for messages in between sees to its
    own; the last one hardly waits.
    """
    messages: Counter[tuple[str, int]] = Counter()
    fresh = waiting = narrowed = returned = back = 0
    for cut in cuts:
        sent = bytes_sent(cut)
        new = cut.bytes * (cut.tensor not in kept) + cut.mask_bytes
        if stage in cut.targets:
            messages["activations", cut.source] += sent + cut.mask_bytes
            fresh += new
            returned += sent * cut.has_gradient
        elif stage == cut.source:
            if sent < cut.bytes:
                narrowed += new - cut.mask_bytes
                new = len(cut.targets) * sent + cut.mask_bytes
            waiting += new
            for target in cut.targets if cut.has_gradient else ():
                messages["gradients", target] += sent
                back += cut.bytes
    received = max(messages.values(), default=0) + back + fresh
    backlog = in_flight if window is None else min(in_flight, window + 1)
    return received, backlog * waiting + narrowed, 0 if back else ON_THEIR_WAY * returned


# Bytes of the number of a row that travels with it.
INDEX_BYTES = 8


def reduction_bytes(graph: LayerGraph, config: PlanConfig, share: float) -> list[float]:
    """Counts what each weight's gradient travels in between replicas, on a rank that trains it.

    The runtime uses the memory again in the next step, so it is there all the time. `share` is the
    part of the weight that the replica updates, 1 or 0, or its mean. Of a weight::

                  packed       as sent       parts of others    sum      new values
        plain     its size                                      its size
        sharded   its size                   of the own share            of others' shares
        bfloat16               half          sums of half size  its size, or the share

    A weight alone in its bucket is not copied, so that this counts at most its size too much.
    The gradient of an embedding table travels as the rows that all replicas look up.
    """
    if config.num_replicas == 1:
        return [0.0] * len(graph.weights)
    ids, tables, sharded = _looked_up_rows(graph), graph.tables, config.shards > 1
    rows = config.micro_batch_size * config.num_micro_batches
    found = []
    for weight in graph.weights:
        size = weight.bytes if weight.trainable else 0
        sent = wire_bytes(size, weight.dtype, config.gradient_dtype)
        rounded = sent < size
        values = (1 - share) * size if sharded else 0.0
        if weight.id in graph.looked_up:
            row = sent // weight.shape[0] + INDEX_BYTES * weight.trainable
            found.append(config.num_replicas * rows * ids[weight.id] * row + values)
            continue
        packed = size * (size <= config.fusion_threshold and weight.id not in tables)
        if sharded:
            parts = (config.num_replicas - 1) * share * sent
            found.append(packed + parts + rounded * (sent + share * size) + values)
        else:
            found.append(packed + sent + rounded * (sent + size))
    return found


def _looked_up_rows(graph: LayerGraph) -> Counter[int]:
    ids: Counter[int] = Counter()
    for node in graph.nodes:
        for weight in node.weights if node.kind in LOOKUPS else ():
            made = graph.tensors[node.outputs[0]]
            row = graph.weights[weight].shape[-1] * item_bytes(made.dtype)
            ids[weight] += made.bytes_per_sample // row
    return ids
