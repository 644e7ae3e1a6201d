"""The parts of a plan: options, stages, tensors cut between them, and how good it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import msgspec

from tarantella_pp.partition.graph.units import MOST, wire_bytes
from tarantella_pp.schedule import send_window

# Two values this close (relative) count as equal: the rounding of long float sums, no more.
TOLERANCE = 1e-9

Size = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How good a plan is known to be."""

    # Bottleneck of the plan, in bytes, seconds or FLOPs: the largest stage, or the largest rank
    # where ranks have several
    value: Amount
    lower_bound: Amount  # no acyclic plan within the same limits has a smaller bottleneck
    # `value / lower_bound - 1`; 0.0 when proven optimal, `None` where the bound is 0
    gap: Amount | None
    optimal: bool  # whether the value is proven optimal (to 1e-9, relative)
    method: str  # which solver found and proved it, in words
    seconds: Amount  # wall-clock time that the solver took

    @classmethod
    def of(cls, value: float, lower_bound: float, method: str, seconds: float) -> Certificate:
        """Makes the certificate that follows from a value and a bound."""
        # Sums in another order may put a bound a rounding above the value it proves.
        bound = min(value, max(lower_bound, 0.0))
        optimal = value <= bound * (1 + TOLERANCE)
        if optimal:
            return cls(value, value, 0.0, True, method, seconds)
        gap = value / bound - 1 if bound > 0 else None
        return cls(value, bound, gap, False, method, seconds)

    def verdict(self, bound: str | None = None) -> str:
        """Says whether the plan is optimal, or else how far from it at the most."""
        if self.optimal:
            return "optimal"
        if self.gap is None:
            return "no lower bound"
        return f"lower bound {bound or f'{self.lower_bound:.6g}'}, gap <= {100 * self.gap:.2g} %"


class StagePlan(msgspec.Struct, frozen=True):
    """One stage and what it costs; files may have fields that versions before had."""

    first: str  # name of its first node
    last: str  # name of its last node
    nodes: Size  # number of its nodes
    parameter_bytes: Size  # trainable variables
    constant_bytes: Size  # other variables
    gradient_bytes: Size  # gradients of the trainable variables
    optimizer_bytes: Size  # slots of the optimizer
    activation_bytes: Size  # what is kept of one micro-batch until its backward pass is done
    in_flight: Size  # most micro-batches that the schedule holds on this stage at a time
    buffer_bytes: Size  # what messages are received into
    flops: Amount  # floating point operations of the forward pass, per sample
    # What a stage that recomputes has besides of what it makes again, of all the micro-batches that
    # run backward at a time, which is one but for split backward passes
    recomputed_bytes: Size = 0
    repeated_bytes: Size = 0  # what it makes again of one micro-batch, if all of that is there
    # Share of its forward pass that it makes again, if it recomputes
    repeated: Amount = 1.0
    # What there is besides for a moment, at the most: gradients on their way back through the
    # stage, messages sent that nobody has received yet, or temporaries of the optimizer that need
    # more than `activation_bytes_total`. On the last stage of a compiled model what loss and
    # metrics hold and make of its outputs, too
    working_bytes: Size = 0
    waiting_bytes: Size = 0  # gradients of one micro-batch that B leaves to a W that waits
    # Seconds of the forward pass of one micro-batch, where measured
    forward_seconds: Amount | None = None
    # Seconds of its backward pass, without a repeated forward pass
    backward_seconds: Amount | None = None
    # Bytes of each bucket in which its gradients are summed over replicas; `None` in files from
    # before there were any
    bucket_bytes: tuple[Number, ...] | None = None
    # What gradients and new values travel in between replicas, which is kept from step to step
    reduction_bytes: Size = 0

    @property
    def reduced_bytes(self) -> tuple[int, ...]:
        """Bytes of each bucket of gradients; all of them in one where that is not known."""
        return (self.gradient_bytes,) if self.bucket_bytes is None else self.bucket_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes that are always there: variables, gradients, their sums, optimizer state."""
        variables = self.parameter_bytes + self.constant_bytes
        return variables + self.gradient_bytes + self.reduction_bytes + self.optimizer_bytes

    @property
    def seconds(self) -> float | None:
        """Seconds of one micro-batch, forward and backward, where measured."""
        if self.forward_seconds is None or self.backward_seconds is None:
            return None
        return self.forward_seconds + self.backward_seconds

    @property
    def activation_bytes_total(self) -> int:
        """Bytes that micro-batches in flight keep, or make again, for their backward passes."""
        return self.in_flight * self.activation_bytes + self.recomputed_bytes

    @property
    def lasting_bytes(self) -> int:
        """Bytes that add up over operations: state, and all that micro-batches keep."""
        return self.state_bytes + self.activation_bytes_total

    @property
    def memory_bytes(self) -> int:
        """Bytes of everything, at the most: what has to fit, and what plans balance."""
        return self.lasting_bytes + self.working_bytes + self.buffer_bytes


class CutEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that is sent from one stage to later ones."""

    tensor: str  # name of the tensor
    source: int  # stage that makes it
    # Stages that read it, ascending; the last stage also where it is an output of the model
    targets: tuple[int, ...]
    dtype: str  # dtype of the tensor
    bytes: Size  # bytes of one micro-batch of it
    has_gradient: bool  # whether a gradient of the same size comes back from each target
    mask_bytes: Size = 0  # bytes of the mask that travels with it, 0 without one


class Tie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable that several stages use; the first one trains it, and sends the new value."""

    weight: str  # name of the variable
    stages: tuple[int, ...]  # the stages, ascending
    bytes: Size  # size of the variable


class OutputUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What loss and metrics of a compiled model need of its outputs."""

    # Why the loss needs the outputs of a whole batch at once, if it does
    loss_at_once: str | None = None
    metrics_at_once: str | None = None  # why the metrics do, if they do
    metrics: bool = False  # whether there are metrics

    @property
    def at_once(self) -> str | None:
        """Why outputs of the whole batch are kept, if they are."""
        return self.loss_at_once or self.metrics_at_once


# Bytes that each stage may have, or one number for each.
MemoryLimit = Number | tuple[Number, ...]

# Whether a pipeline's ranks are neighbours, or a stage's.
Placement = Literal["pipelines-together", "replicas-together"]
# In what numbers travel, from stage to stage or between replicas, if not as they are.
NarrowDtype = Literal["bfloat16"]
# Bytes of a bucket of gradients, where no other is asked for.
FUSION_THRESHOLD = 32 * 2**20


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a plan was made with; those that were left open are chosen; see `Plan`."""

    num_stages: Number
    num_micro_batches: Number
    num_replicas: Number
    batch_size: Number
    schedule: str
    balance: str
    memory_limit: MemoryLimit | None
    recompute: tuple[int, ...] = ()  # stages, ascending
    # What a byte of activations is worth to the stages that do not recompute; see `least_kept`
    flops_per_byte: Amount = 0.0
    # The same for each operation, of stages that do; empty where these make all of it again
    recompute_worth: tuple[Amount, ...] = ()
    ranks: tuple[int, ...] = ()
    placement: Placement = "pipelines-together"
    fusion_threshold: Number = FUSION_THRESHOLD
    shard_optimizer: bool = False
    gradient_dtype: NarrowDtype | None = None
    wire_dtype: NarrowDtype | None = None

    def recomputes(self, stage: int | None = None) -> bool:
        """Whether a stage, or any, repeats its forward pass or parts of it."""
        return bool(self.recompute) if stage is None else stage in self.recompute

    def prices(self, stage: int, nodes: Sequence[int]) -> list[float]:
        """What a byte of activations is worth to some operations of a stage."""
        if not self.recomputes(stage):
            return [self.flops_per_byte] * len(nodes)
        return [self.recompute_worth[node] if self.recompute_worth else math.inf for node in nodes]

    def sent(self, cut: CutEdge) -> int:
        """Returns the bytes of one micro-batch of a tensor as it travels, without its mask."""
        return wire_bytes(cut.bytes, cut.dtype, self.wire_dtype)

    @property
    def shards(self) -> int:
        """Replicas that share out the optimizer state; 1 where each has all of it."""
        return self.num_replicas if self.shard_optimizer else 1

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch on one replica, rounded up."""
        return -(-self.batch_size // (self.num_replicas * self.num_micro_batches))

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return 1 + max(self.ranks) if self.ranks else self.num_stages

    @property
    def send_window(self) -> int | None:
        """Most micro-batches that a stage has sent and that are not taken; `None` for any."""
        return send_window(self.schedule, self.num_stages, self.num_ranks)

    def world_rank(self, replica: int, position: int) -> int:
        """Returns the rank in the job of a position in a replica.

        Two replicas of three ranks::

            pipelines-together     replica 0: 0 1 2     replicas-together     replica 0: 0 2 4
                                   replica 1: 3 4 5                           replica 1: 1 3 5
        """
        if self.placement == "pipelines-together":
            return replica * self.num_ranks + position
        return position * self.num_replicas + replica

    @property
    def limits(self) -> tuple[int, ...] | None:
        """The memory limit of each stage; `None` for any."""
        limit = self.memory_limit
        return (limit,) * self.num_stages if isinstance(limit, int) else limit

    def limited_to(self, limit: MemoryLimit | None) -> Self:
        """Returns the same with another memory limit, or none."""
        return msgspec.structs.replace(self, memory_limit=limit)

    def ways_to_less_memory(self) -> str:
        """Says which other options would take less memory."""
        ways = ["smaller batches", "more stages"]
        if self.num_micro_batches < self.batch_size:
            ways.append("more micro-batches")
        if len(self.recompute) < self.num_stages:
            ways.append("recompute='all'")
        if self.num_replicas > 1 and not self.shard_optimizer:
            ways.append("shard_optimizer=True")
        return f"Less is needed with {', '.join(ways[:-1])} or {ways[-1]}."

    def must_hold(self) -> dict[str, bool]:
        """What options have to be like, in words, and whether they are."""
        count, limits = self.num_stages, self.limits
        ranks, again = [*self.ranks], [*self.recompute]
        return {
            f"memory_limit must be one number, or one a stage. Received: {limits}": (
                limits is None or len(limits) == count
            ),
            f"ranks must name one for each stage, or none. Received: {ranks}": (
                len(ranks) in (0, count) and set(ranks) == set(range(len(set(ranks))))
            ),
            f"recompute must name stages, ascending. Received: {again}": ascends(again, count),
        }


def ascends(stages: Sequence[int], num_stages: int) -> bool:
    """Whether these are stages, each once, in their order."""
    return all(a < b for a, b in itertools.pairwise([-1, *stages, num_stages]))


def common_limit(limits: Sequence[int]) -> int | None:
    """Returns the memory limit of all stages, `None` where they have different ones."""
    return limits[0] if len(set(limits)) == 1 else None
