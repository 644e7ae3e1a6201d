"""The options of a plan, checked, with those that were left open chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.plan import micro_batch_size
from tarantella_pp.partition.sizes import parse_bytes

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
BALANCES = ("memory", "flops")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan; see `make_plan`.

    Attributes:
        num_stages: Number of pipeline stages.
        num_micro_batches: Micro-batches of a step.
        rows: Samples of one micro-batch on one replica.
        schedule: Name of the schedule.
        balance: What the stages are balanced by.
        memory_limit: Largest memory of a stage in bytes; `None` for any.
        in_flight: Most micro-batches that each stage holds at a time.
    """

    num_stages: int
    num_micro_batches: int
    rows: int
    schedule: str
    balance: str
    memory_limit: int | None
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float | None:
        """Share of a step that a rank waits, where there is a formula for it."""
        waits, works = self.num_stages - 1, self.num_micro_batches
        if self.schedule == "zb-h1":
            works *= 3
        return waits / (works + waits) if self.schedule in SCHEDULES else None

    @classmethod
    def checked(
        cls,
        *,
        num_stages: int,
        batch_size: int,
        num_micro_batches: int | None,
        num_replicas: int,
        schedule: str,
        balance: str,
        memory_limit: int | float | str | None,
        in_flight: Sequence[int] | None,
    ) -> PlanOptions:
        """Checks the arguments of `make_plan`, which says what they mean, and chooses defaults.

        Raises:
            ConfigurationError: One of them cannot work, alone or with the others.
        """
        stages = _count("num_stages", num_stages)
        batch, replicas = _count("batch_size", batch_size), _count("num_replicas", num_replicas)
        if batch < replicas:
            raise ConfigurationError(
                "Each replica needs a sample of the batch. "
                f"Received: batch_size={batch}, num_replicas={replicas}"
            )
        if num_micro_batches is None:
            micro_batches = 1 if stages == 1 else min(4 * (stages - 1), max(2, batch // replicas))
        else:
            micro_batches = _count("num_micro_batches", num_micro_batches)
        _choice("balance", balance, BALANCES)
        return cls(
            num_stages=stages,
            num_micro_batches=micro_batches,
            rows=micro_batch_size(batch, replicas, micro_batches),
            schedule=schedule,
            balance=balance,
            memory_limit=None
            if memory_limit is None
            else parse_bytes(memory_limit, "memory_limit"),
            in_flight=_in_flight(schedule, stages, micro_batches, in_flight),
        )


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise ConfigurationError(f"Expected a whole number from 1 on. Received: {name}={value!r}")
    return int(value.__index__())


def _choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(f"Expected one of {choices}. Received: {name}={value!r}")


def _in_flight(
    schedule: str, stages: int, micro_batches: int, given: Sequence[int] | None
) -> tuple[int, ...]:
    if given is not None:
        if not isinstance(schedule, str) or not schedule:
            raise ConfigurationError(f"Expected a name. Received: schedule={schedule!r}")
        counts = tuple(_count("in_flight", held) for held in given)
        if len(counts) != stages:
            raise ConfigurationError(
                f"Expected one count for each of the {stages} stages. Received: in_flight={counts}"
            )
        return counts
    _choice("schedule", schedule, SCHEDULES)
    if schedule == "gpipe":
        return (micro_batches,) * stages
    most = stages if schedule == "zb-h1" else 0
    return tuple(min(most or stages - stage, micro_batches) for stage in range(stages))
