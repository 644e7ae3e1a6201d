"""From a Keras model to a plan: reads the graph, counts the costs, solves and writes it down."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import msgspec
import numpy as np
import numpy.typing as npt

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.best_stages import Solution, best_solution, given_solution, sums_of
from tarantella_pp.partition.graph.ideals import Array, Blocks
from tarantella_pp.partition.graph.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.least_kept import FLOPS_PER_BYTE
from tarantella_pp.partition.graph.optimizer_slots import optimizer_name, optimizer_state_bytes
from tarantella_pp.partition.node_link import NamedGraph
from tarantella_pp.partition.options import GIVEN, Settings
from tarantella_pp.partition.plan.gradient_buckets import bucket_bytes, gradient_buckets
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, NodeWork, node_work
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import PlanConfig
from tarantella_pp.partition.plan.stage_costs import StageCostModel
from tarantella_pp.partition.profile import Profile

#: Layers that no stage makes again: TensorFlow keeps its loops with all they made.
LOOPS = (
    *("LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional"),
    *("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"),
)
#: What a byte of activations may be worth where stages recompute, in FLOPs. With the last one they
#: keep little more than what lies between two parts; see `least_kept`.
WORTHS = tuple(FLOPS_PER_BYTE * 2**k for k in range(1, 9))
EVERYTHING = 1e12
#: What finding stages takes besides listing what may come before a cut, in such sets of operations.
PROBLEM_EFFORT = 1_500
# Nodes above which pricing stages whole takes longer than all else.
NODES_AT_ONCE = 20
#: Samples that batch normalization gets to see, where the number of its calls is open.
LEAST_ROWS = 4


@dataclass(frozen=True)
class Planner:
    """Makes plans of one model, for any options."""

    model: str  # name of the model
    graph: LayerGraph  # its layer graph
    optimizer: str  # name of the optimizer whose slots count
    slots: Sequence[int]  # bytes of its slots for each variable of the graph
    profile: Profile | None = None  # what was measured of the operations, if anything
    machine: HardwareSpec | None = None  # what computes; `None` where arithmetic alone counts
    # Stage of each node where that is given, for `balance="given"`
    assignment: tuple[int, ...] | None = None
    _solved: dict[tuple[Hashable, ...], Solution] = field(
        default_factory=dict, init=False, compare=False
    )

    @cached_property
    def work(self) -> tuple[NodeWork, ...]:
        """What each node does."""
        return node_work(self.graph)

    @cached_property
    def blocks(self) -> Blocks:
        """Its operations, joined where they must share a stage."""
        return Blocks.of(self.graph)

    @classmethod
    def of(
        cls,
        model: keras.Model | ExtractedModel | NamedGraph,
        optimizer: Any = None,
        profile: Profile | None = None,
        machine: HardwareSpec | None = None,
        assignment: tuple[int, ...] | None = None,
    ) -> Planner:
        """Reads a model, if that has not been done."""
        if isinstance(model, NamedGraph):
            name, graph, profile = model.name, model.graph, profile or model.profile
        else:
            extracted = extract(model)
            name, graph = extracted.model.name, extracted.graph
        if profile is not None:
            profile.check(graph)
            graph = profile.apply(graph)
        slots = optimizer_state_bytes(optimizer, graph.weights)
        return cls(name, graph, optimizer_name(optimizer), slots, profile, machine, assignment)

    @cached_property
    def loops(self) -> list[bool]:
        """Which nodes are loops."""
        return [node.kind in LOOPS for node in self.graph.nodes]

    @property
    def least_rows(self) -> int:
        """Samples that a micro-batch keeps, where the number of micro-batches is open."""
        kinds = {node.kind for node in self.graph.nodes}
        return LEAST_ROWS if "BatchNormalization" in kinds else 1

    def check_stages(self, num_stages: int) -> None:
        """Refuses more stages than there are operations."""
        nodes = len(self.graph.nodes)
        if num_stages > nodes:
            raise ConfigurationError(
                f"Model '{self.model}' has too few operations. Use at most num_stages={nodes}, and "
                f"replicas (num_replicas) for more ranks. Received: num_stages={num_stages}."
            )

    def costs(self, options: Settings) -> StageCostModel:
        """Returns the costs of the nodes for micro-batches of these options."""
        seconds = None if self.profile is None else self.profile.seconds(options.micro_batch_size)
        return StageCostModel(
            self.graph, self.slots, options, seconds, machine=self.machine, work=self.work,
            in_flight=options.in_flight, held_again=options.held_again,
        )  # fmt: skip

    @property
    def effort(self) -> float:
        """About what finding stages once takes, in sets of nodes before a cut."""
        return math.inf if self.blocks.ideals is None else len(self.blocks.ideals) + PROBLEM_EFFORT

    @property
    def spent(self) -> float:
        """The effort of all problems that have been solved so far."""
        wholes = sum(bool(weighs) for *_, weighs, _ in self._solved)
        more = wholes * max(0.0, len(self.graph.nodes) / NODES_AT_ONCE - 1)
        return self.effort * (len(self._solved) + more) if self._solved else 0.0

    def solve(self, options: Settings, *, roughly: bool = False, by_sums: bool = False) -> Solution:
        """Finds the best stages for these options, or with a bound of the best, once."""
        if options.balance == "time" and self.profile is None:
            raise ConfigurationError(
                "Time is balanced with a profile. Received: balance='time', profile=None"
            )
        if options.balance == GIVEN:
            if self.assignment is None or max(self.assignment) + 1 != options.num_stages:
                raise ConfigurationError(
                    "A given balance has a number of layers for each stage. Received: "
                    f"balance='given', num_stages={options.num_stages}"
                )
            return given_solution(self.costs(options), options, self.assignment)
        self.check_stages(options.num_stages)
        # To price every stage that recomputes takes minutes; what adds up is known at once.
        whole = options.weighs_stages and not by_sums and (not roughly or bool(options.recompute))
        key = (*options.problem_key, whole, by_sums)
        if key not in self._solved:
            self._solved[key] = best_solution(
                self.costs(options), options, self.blocks, whole=whole, by_sums=by_sums
            )
        return self._solved[key]

    def recomputing(self, options: Settings, worth: float | None) -> Settings:
        """The same options with all stages recomputing at a price.

        `None` leaves the stages that do so as they are; loops never run again.
        """
        if worth is None and not (options.recompute and any(self.loops)):
            return options
        worths = [options.flops_per_byte if loop else worth or EVERYTHING for loop in self.loops]
        made = options.recomputing(worths)
        return made if worth else msgspec.structs.replace(made, recompute=options.recompute)

    def refined(self, solution: Solution, options: Settings) -> Settings:
        """Finds how little some stages have to make again to keep their limits.

        Each stage takes the smallest of `WORTHS` with which it does, and that only for its first
        operations, as few as possible: a knapsack that is filled greedily (Liu et al., "AdaPipe",
        ASPLOS 2024, fills it by a dynamic program).
        """
        limits, stages = options.limits, np.array(solution.assignment)
        if limits is None:
            return options
        own = [np.flatnonzero(stages == stage) for stage in range(options.num_stages)]
        dearest = np.array(options.recompute_worth)

        def settings(worth: Array) -> Settings:
            cheap = np.minimum(dearest, worth)
            made = options.recomputing(cheap.tolist())
            again = [i for i, n in enumerate(own) if (cheap[n] > options.flops_per_byte).any()]
            return msgspec.structs.replace(made, recompute=tuple(again))

        def fits(worth: Array) -> npt.NDArray[np.bool_]:
            costs = self.costs(settings(worth)).stages(solution.assignment)
            return np.array([one.memory_bytes for one in costs]) <= np.array(limits)

        above = below = np.full(options.num_stages, options.flops_per_byte)
        kept = fits(above[stages])
        for worth in WORTHS:
            below, above = np.where(kept, below, above), np.where(kept, above, worth)
            kept = kept | fits(above[stages])

        def mixed(first: Array) -> Array:
            worth: Array = below[stages]
            for stage, nodes in enumerate(own):
                worth[nodes[: first[stage]]] = above[stage]
            return worth

        high = np.array([len(nodes) for nodes in own])
        low = np.where(above > below, 0, high)
        while (high - low > 1).any():
            middle = (low + high + 1) // 2
            kept = fits(mixed(middle))
            low, high = np.where(kept, low, middle), np.where(kept, middle, high)
        return settings(mixed(high))

    def least_memory(self, options: Settings) -> float:
        """Returns bytes that some stage of every plan needs, whichever stages recompute."""
        # All of them make everything again, whatever the limit.
        free = msgspec.structs.replace(options, balance="memory").limited_to(None).recomputing(())
        return sums_of(self.costs(free), free).bound(self.blocks)

    def write(self, solution: Solution, options: Settings) -> Plan:
        """Writes down the plan of an assignment."""
        graph, assignment, costs = self.graph, solution.assignment, self.costs(options)
        buckets = gradient_buckets(graph, assignment, options.num_stages, options.fusion_threshold)
        stages = costs.stages(assignment)
        guessed = [
            n.kind
            for n in graph.nodes
            if n.residual_source == "estimated"
            or (n.flops_source == "estimated" and self.profile is None)
        ]
        return Plan(
            **{name: getattr(options, name) for name in PlanConfig.__struct_fields__},
            model=self.model,
            optimizer=self.optimizer,
            fingerprint=graph.fingerprint(),
            node_names=tuple(node.name for node in graph.nodes),
            assignment=assignment,
            stages=tuple(
                msgspec.structs.replace(
                    stage, bucket_bytes=bucket_bytes(graph, own, options.gradient_dtype)
                )
                for stage, own in zip(stages, buckets, strict=True)
            ),
            cuts=costs.cuts(assignment),
            ties=costs.ties(assignment),
            certificate=solution.certificate,
            assumed_size=graph.assumed_size,
            estimated=tuple(dict.fromkeys(guessed)),
            machine=self.machine,
            work=self.work,
        )
