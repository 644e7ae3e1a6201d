"""The options of a plan, checked, with those that were left open chosen."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from tarantella_pp.errors import ConfigurationError, checked_count
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.least_kept import FLOPS_PER_BYTE
from tarantella_pp.partition.graph.units import parse_bytes
from tarantella_pp.partition.plan.gradient_buckets import fusion_threshold_of
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan_parts import MemoryLimit, NarrowDtype, Placement, PlanConfig
from tarantella_pp.partition.profile import Profile
from tarantella_pp.schedule import HeldAgain, Schedule, ScheduleSpec

BALANCES = ("memory", "time", "flops")
# The balance of a plan whose stages were given.
GIVEN = "given"
# What the option `recompute` may be: "all", "none" or stages.
Recompute = str | Sequence[int]
PLACEMENTS: tuple[str, ...] = get_args(Placement)


class Settings(PlanConfig, frozen=True, kw_only=True):
    """Options of a plan, checked, with what its schedule says of them."""

    in_flight: tuple[int, ...]  # most micro-batches that each stage holds at a time
    # For how many micro-batches each stage holds what B made for W, or what it made again
    held_again: tuple[HeldAgain, ...]

    @property
    def weighs_stages(self) -> bool:
        """Whether the largest stage is to be small with all that it has in memory."""
        return self.balance == "memory" and not self.ranks

    def recomputing(self, worth: Sequence[float]) -> Settings:
        """The same with all stages recomputing at these prices; see `recompute_worth`."""
        every = tuple(range(self.num_stages))
        return msgspec.structs.replace(self, recompute=every, recompute_worth=tuple(worth))

    @property
    def problem_key(self) -> tuple[Hashable, ...]:
        """What the best stages depend on: options with equal keys have the same."""
        # Arithmetic depends on no schedule: one problem for all of them, solved once.
        if self.balance == "flops" and self.limits is None and not self.ranks:
            return (self.balance, self.num_stages, self.micro_batch_size, self.wire_dtype)
        return (msgspec.structs.replace(self, schedule=""), self.send_window)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan is asked for, as a user says it (see `make_plan`); `None` leaves it open."""

    num_stages: int | None = None
    batch_size: int = 32
    num_micro_batches: int | None = None
    num_replicas: int | None = None
    num_ranks: int | None = None
    stages_per_rank: int | None = None
    schedule: str | Path | Schedule | None = None
    balance: str | Sequence[int] | None = None
    memory_limit: int | float | str | Sequence[int | float | str] | None = None
    recompute: Recompute | None = None
    optimizer: Any = None
    profile: Profile | None = None
    machine: HardwareSpec | str | Path | None = None
    placement: str = PLACEMENTS[0]
    fusion_threshold: int | float | str | None = None
    shard_optimizer: bool = False
    gradient_dtype: str | None = None
    wire_dtype: str | None = None

    def implied_stages(self, custom: Schedule | None) -> int | None:
        """Number of stages, also where a user's own schedule or several limits say it."""
        if self.num_stages is None and custom is not None:
            return custom.num_stages
        if self.num_stages is None and isinstance(self.memory_limit, (list, tuple)):
            return len(self.memory_limit)
        return self.num_stages

    @property
    def limited(self) -> bool:
        """Whether there is a memory limit."""
        return self.memory_limit is not None

    def given(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults."""
        pairs = [(f, getattr(self, f.name)) for f in fields(self)]
        return {f.name: value for f, value in pairs if value is not None and value != f.default}

    def settled(self, spec: ScheduleSpec | None = None) -> Settings:
        """Checks all options, and chooses the ones that are open without comparing plans."""
        stages = checked_count("num_stages", self.num_stages)
        batch = checked_count("batch_size", self.batch_size)
        replicas = checked_count("num_replicas", _or(self.num_replicas, 1))
        if batch < replicas:
            raise ConfigurationError(
                "Each replica needs a sample of the batch. "
                f"Received: batch_size={batch}, num_replicas={replicas}"
            )
        # With 4 (p - 1) micro-batches the bubble of 1F1B, (p - 1) / (m + p - 1), is a fifth.
        usual = 1 if stages == 1 else min(4 * (stages - 1), max(2, batch // replicas))
        micro_batches = checked_count("num_micro_batches", _or(self.num_micro_batches, usual))
        if self.balance != GIVEN:
            _choice("balance", self.balance, BALANCES)
        _choice("placement", self.placement, PLACEMENTS)
        spec = spec or ScheduleSpec.of(_or(self.schedule, "1f1b"), stages)
        again = stages_to_recompute(_or(self.recompute, "none"), stages)
        shared = len(set(spec.placement)) < len(spec.placement)
        return Settings(
            num_stages=stages,
            num_micro_batches=micro_batches,
            num_replicas=replicas,
            batch_size=batch,
            schedule=spec.name,
            balance=cast("str", self.balance),
            memory_limit=_memory_limit(self.memory_limit, stages),
            in_flight=spec.make(micro_batches).held,
            held_again=spec.held_again(micro_batches),
            recompute=again,
            flops_per_byte=0.0 if self.recompute == "none" else FLOPS_PER_BYTE,
            ranks=spec.placement if shared else (),
            placement=cast("Placement", self.placement),
            fusion_threshold=fusion_threshold_of(self.fusion_threshold),
            shard_optimizer=bool(self.shard_optimizer),
            gradient_dtype=narrow_dtype("gradient_dtype", self.gradient_dtype),
            wire_dtype=narrow_dtype("wire_dtype", self.wire_dtype),
        )


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def narrow_dtype(option: str, given: Any) -> NarrowDtype | None:
    """Returns the type that numbers travel in, `None` for their own."""
    if given not in (None, "bfloat16"):
        raise ConfigurationError(
            f"Expected 'bfloat16', or None for the numbers' own type. Received: {option}={given!r}"
        )
    return cast("NarrowDtype | None", given)


def stages_to_recompute(recompute: Any, num_stages: int) -> tuple[int, ...]:
    """Reads the option `recompute`."""
    if isinstance(recompute, str) and recompute in ("all", "none"):
        return tuple(range(num_stages if recompute == "all" else 0))
    listed = isinstance(recompute, Iterable) and not isinstance(recompute, Mapping)
    given = list(recompute) if listed else [recompute]
    whole = all(hasattr(s, "__index__") and not isinstance(s, bool) for s in given)
    stages = {s.__index__() for s in given} if whole else set()
    if whole and len(stages) == len(given) and stages <= set(range(num_stages)):
        return tuple(sorted(stages))
    raise ConfigurationError(
        f"Expected 'all', 'none', or different stages from 0 to {num_stages - 1}. "
        f"Received: recompute={recompute!r}"
    )


def _memory_limit(given: Any, stages: int) -> MemoryLimit | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        return parse_bytes(given, "memory_limit")
    limits = tuple(parse_bytes(limit, "memory_limit") for limit in given)
    if len(limits) != stages:
        raise ConfigurationError(
            f"Expected one limit, or one for each of the {stages} stages. "
            f"Received: memory_limit={given!r}"
        )
    return limits


def _choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(f"Expected one of {choices}. Received: {name}={value!r}")


def is_given(balance: Any) -> bool:
    """Whether an option `balance` is numbers of layers."""
    return isinstance(balance, Iterable) and not isinstance(balance, str)


def assignment_of(graph: LayerGraph, balance: Iterable[Any]) -> tuple[int, ...]:
    """Returns the stage of each node."""
    counts = [int(n) if hasattr(n, "__index__") and n is not True else n for n in balance]
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise ConfigurationError(
            "Expected 'memory', 'time', 'flops', or a positive number of layers for each stage. "
            f"Received: balance={counts}"
        )
    places, ends = _places(graph, counts), list(itertools.accumulate(counts))
    stages = tuple(next(s for s, end in enumerate(ends) if place < end) for place in places)
    wrong = graph.misplaced(stages)
    if empty := sorted(set(range(len(counts))) - set(stages)):
        wrong = f"Stages {empty} would have no operations"
    if wrong:
        raise ConfigurationError(f"{wrong}. Received: balance={counts}")
    return stages


def _places(graph: LayerGraph, counts: Sequence[int]) -> list[int]:
    """Returns the place of each node among the things counted."""
    # The model's own layers, a nested one as one; else operations; or, where layers are numbered by
    # name (`l0`, `l1_conv`, `l1_add` ...), these numbers.
    names = [node.name.partition("/")[0] for node in graph.nodes]
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    if sum(counts) == len(order):
        return [order[name] for name in names]
    if sum(counts) == len(names):
        return list(range(len(names)))
    found = [re.search(r"\d+", name) for name in names]
    numbers = [int(match[0]) for match in found if match]
    if len(numbers) == len(names) and max(numbers) + 1 == sum(counts):
        return numbers
    raise ConfigurationError(
        f"Numbers of layers must add up to the model's {len(order)} layers, or its {len(names)} "
        f"operations. Received: balance={list(counts)}, which adds up to {sum(counts)}"
    )
