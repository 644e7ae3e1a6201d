"""The options of a plan, checked, with those that were left open chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.plan import MemoryLimit, limit_of_each, micro_batch_size
from tarantella_pp.partition.sizes import parse_bytes

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
BALANCES = ("memory", "time", "flops")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan; see `make_plan`.

    Attributes:
        num_stages: Number of pipeline stages.
        num_micro_batches: Micro-batches of a step.
        num_replicas: Number of pipelines side by side.
        batch_size: Samples of a step, over all replicas.
        rows: Samples of one micro-batch on one replica.
        schedule: Name of the schedule.
        balance: What the stages are balanced by.
        memory_limit: Largest memory of a stage in bytes, one number or one for each stage; `None`
            for any.
        in_flight: Most micro-batches that each stage holds at a time.
        recompute: The stages that repeat their forward pass, ascending.
        ranks: Rank of each stage; empty where each has its own.
    """

    num_stages: int
    num_micro_batches: int
    num_replicas: int
    batch_size: int
    rows: int
    schedule: str
    balance: str
    memory_limit: MemoryLimit | None
    in_flight: tuple[int, ...]
    recompute: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def limits(self) -> tuple[int, ...] | None:
        """The memory limit of each stage; `None` for any."""
        return limit_of_each(self.memory_limit, self.num_stages)

    @property
    def fill(self) -> float:
        """How much the largest stage counts in a step's time besides the largest rank."""
        if self.balance == "memory" or not self.ranks:
            return 0.0
        return max(self.ranks) / self.num_micro_batches

    @property
    def repeats(self) -> dict[int, int]:
        """Stages that repeat their forward pass, and for how many micro-batches at a time.

        For one, where both gradients are computed together. Where weight gradients wait, what
        they need waits with them: stage s of zb-h1 puts off up to s of them.
        """
        waiting = {"zb-h1": range(self.num_stages)}.get(self.schedule, self.in_flight)
        if not self.schedule.startswith("zb-"):
            waiting = (0,) * self.num_stages
        return {s: min(1 + waiting[s], self.in_flight[s]) for s in self.recompute}

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
        memory_limit: int | float | str | Sequence[int | float | str] | None,
        in_flight: Sequence[int] | Callable[[int], Sequence[int]] | None,
        recompute: str | Sequence[int] = "none",
        ranks: tuple[int, ...] = (),
    ) -> PlanOptions:
        """Checks the arguments of `make_plan`, which says what they mean, and chooses defaults.

        A schedule other than `SCHEDULES` has no formula: `in_flight` says what it holds, or is a
        function of the number of micro-batches that does.

        Raises:
            ConfigurationError: One of them cannot work, alone or with the others.
        """
        stages = checked_count("num_stages", num_stages)
        batch, replicas = (
            checked_count("batch_size", batch_size),
            checked_count("num_replicas", num_replicas),
        )
        if batch < replicas:
            raise ConfigurationError(
                "Each replica needs a sample of the batch. "
                f"Received: batch_size={batch}, num_replicas={replicas}"
            )
        if num_micro_batches is None:
            micro_batches = 1 if stages == 1 else min(4 * (stages - 1), max(2, batch // replicas))
        else:
            micro_batches = checked_count("num_micro_batches", num_micro_batches)
        _choice("balance", balance, BALANCES)
        return cls(
            num_stages=stages,
            num_micro_batches=micro_batches,
            num_replicas=replicas,
            batch_size=batch,
            rows=micro_batch_size(batch, replicas, micro_batches),
            schedule=schedule,
            balance=balance,
            memory_limit=_memory_limit(memory_limit, stages),
            in_flight=_in_flight(schedule, stages, micro_batches, in_flight),
            recompute=stages_to_recompute(recompute, stages),
            ranks=ranks,
        )


def stages_to_recompute(recompute: Any, num_stages: int) -> tuple[int, ...]:
    """Reads the option `recompute`.

    Args:
        recompute: `"all"`, `"none"` or the stages.
        num_stages: Number of stages.

    Returns:
        The stages, ascending.

    Raises:
        ConfigurationError: It is none of these.
    """
    named: dict[Any, tuple[int, ...]] = {"none": (), "all": tuple(range(num_stages))}
    if isinstance(recompute, str) and recompute in named:
        return named[recompute]
    given = list(recompute) if isinstance(recompute, Iterable) else [recompute]
    whole = all(hasattr(s, "__index__") and not isinstance(s, bool) for s in given)
    stages = tuple(sorted(s.__index__() for s in given)) if whole else ()
    if whole and len(set(stages)) == len(given) and set(stages) <= set(range(num_stages)):
        return stages
    raise ConfigurationError(
        f"Expected 'all', 'none' or different stages from 0 to {num_stages - 1}. "
        f"Received: recompute={recompute!r}"
    )


def checked_count(name: str, value: Any) -> int:
    """Reads an option that is a whole number from 1 on.

    Args:
        name: Its name, for the message.
        value: What was given.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise ConfigurationError(f"Expected a whole number from 1 on. Received: {name}={value!r}")
    return int(value.__index__())


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


def _in_flight(
    schedule: str,
    stages: int,
    micro_batches: int,
    given: Sequence[int] | Callable[[int], Sequence[int]] | None,
) -> tuple[int, ...]:
    if callable(given):
        given = given(micro_batches)
    if given is not None:
        if not isinstance(schedule, str) or not schedule:
            raise ConfigurationError(f"Expected a name. Received: schedule={schedule!r}")
        counts = tuple(checked_count("in_flight", held) for held in given)
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
