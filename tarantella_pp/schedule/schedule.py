"""The schedule: what every rank does in one training step, in which order; its actions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from tarantella_pp.errors import ScheduleError

Kind: TypeAlias = Literal["F", "R", "B", "W", "BW"]
Direction: TypeAlias = Literal["F", "B"]
Operation: TypeAlias = Literal["S", "R"]
Link: TypeAlias = tuple[int, int]
Message: TypeAlias = tuple[int, int, int]

_COMPUTE = re.compile(r"(\d+)(F|R|BW|B|W)(\d+)")
_TRANSFER = re.compile(r"(\d+)>(\d+)([SR])([FB])(\d+)")
_REDUCE = re.compile(r"(\d+)A(\d+)")


class Compute(NamedTuple):
    """One computation of one stage for one micro-batch, written ``2F0``."""

    stage: int
    # `F` forward, `R` what the backward pass needs of it once more, `B` gradient with respect to
    # the stage's inputs, `W` gradient with respect to its weights, `BW` both at once
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Transfer(NamedTuple):
    """One end of a message between two stages, written ``0>1SF3`` (send) or ``0>1RF3`` (receive).

    A message carries all tensors that go from one stage to another for one micro-batch, in one
    direction. `source` is always the stage that sends: activations of micro-batch 3 go as
    ``0>1SF3``, and their gradients come back as ``1>0SB3``.
    """

    source: int
    target: int
    # `S` hands the message over here, `R` has its receive posted here at the latest; the
    # computation that needs the message waits for it
    operation: Operation
    direction: Direction  # `F` for activations, `B` for gradients
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.source}>{self.target}{self.operation}{self.direction}{self.micro_batch}"

    @property
    def message(self) -> Message:
        """What both ends of a message have in common: source, target and micro-batch."""
        return (self.source, self.target, self.micro_batch)


class Reduce(NamedTuple):
    """The sum of one bucket of a stage's gradients over replicas, which starts here: ``2A0``."""

    stage: int
    bucket: int  # the bucket of its gradients, from 0

    def __str__(self) -> str:
        return f"{self.stage}A{self.bucket}"


Action: TypeAlias = Compute | Transfer | Reduce


def parse_action(text: str) -> Action:
    """Reads an action as `str` writes it."""
    if found := _COMPUTE.fullmatch(text):
        return Compute(int(found[1]), found[2], int(found[3]))  # type: ignore[arg-type]
    if found := _TRANSFER.fullmatch(text):
        source, target, operation, direction, micro_batch = found.groups()
        return Transfer(int(source), int(target), operation, direction, int(micro_batch))  # type: ignore[arg-type]
    if found := _REDUCE.fullmatch(text):
        return Reduce(int(found[1]), int(found[2]))
    raise ScheduleError(
        "Expected an action: a computation such as 2F0, 1B3, 1W3 or 1BW3 (stage, kind, "
        "micro-batch), a message such as 0>1SF3 or 1>0RB3, or a reduction such as 2A0. "
        f"Received: {text!r}"
    )


_HEADERS = ("schedule", "stages", "micro_batches", "placement")
_RANK = re.compile(r"rank \d+")


class HeldAgain(NamedTuple):
    """What a stage holds of what it repeated."""

    micro_batches: int = 0  # of how many
    whole: bool = False  # whether also the one that runs backward is there whole, by an R


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step, as data.

    A schedule comes from `make_schedule` or from a text file with computations only; `lower`
    adds the messages. The communication between two computations of a rank is one *exchange*,
    whose receives are posted when the rank enters it. A send hands its message over where it
    stands. A receive stands where it must have been posted at the latest; the computation that
    needs the message, the next of its stage and micro-batch, waits for it.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_ranks: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    links: tuple[Link, ...] | None = None
    gradient_links: tuple[Link, ...] | None = None
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for option in ("num_stages", "num_micro_batches", "num_ranks"):
            if (value := getattr(self, option)) < 1:
                raise ScheduleError(f"Expected at least 1. Received: {option}={value}")
        checked_placement(self.placement, self.num_stages, self.num_ranks)
        if len(self.actions) != self.num_ranks:
            raise ScheduleError(
                f"Expected one list of actions for each of the {self.num_ranks} ranks. "
                f"Received: {len(self.actions)} lists"
            )
        if self.buckets and (len(self.buckets) != self.num_stages or min(self.buckets) < 0):
            raise ScheduleError(
                f"Expected a number of buckets for each of the {self.num_stages} stages. "
                f"Received: buckets={self.buckets}"
            )

    @property
    def is_lowered(self) -> bool:
        """Whether the schedule has its messages."""
        return self.links is not None

    @cached_property
    def has_backward(self) -> bool:
        """Whether the schedule trains; False for inference, which runs forwards only."""
        return any(action.kind != "F" for action in self.computations())

    def computations(self) -> Iterator[Compute]:
        """Iterates over the computations of all ranks, rank by rank."""
        for actions in self.actions:
            for action in actions:
                if isinstance(action, Compute):
                    yield action

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that `rank` owns, in increasing order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def in_flight(self, stage: int) -> int:
        """Returns how many micro-batches' residuals `stage` holds at the worst moment."""
        return self.held[stage]

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Of how many micro-batches each stage holds the residuals at the worst moment."""
        held, peak = [0] * self.num_stages, [0] * self.num_stages
        for rank in range(self.num_ranks):
            for action, change in self.residual_changes(rank):
                held[action.stage] += change
                peak[action.stage] = max(peak[action.stage], held[action.stage])
        return tuple(peak)

    def held_again(self) -> tuple[HeldAgain, ...]:
        """Returns of how many micro-batches each stage holds what it repeated, at the worst."""
        held, peak = [0] * self.num_stages, [0] * self.num_stages
        for action in self.computations() if self.has_backward else ():
            repeated = (action.stage, action.micro_batch) in self.repeated
            if action.kind == "R" or (action.kind in ("B", "BW") and not repeated):
                held[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], held[action.stage])
            held[action.stage] -= action in self._releases
        whole = {stage for stage, _ in self.repeated}
        return tuple(HeldAgain(count, stage in whole) for stage, count in enumerate(peak))

    @cached_property
    def repeated(self) -> frozenset[tuple[int, int]]:
        """Stage and micro-batch of each R."""
        return frozenset((a.stage, a.micro_batch) for a in self.computations() if a.kind == "R")

    def repeating(self, which: Collection[tuple[int, int]]) -> Schedule:
        """Returns the same order with an R directly before the backward pass of some more."""
        which = set(which) - self.repeated
        actions: list[list[Action]] = [[] for _ in self.actions]
        for made, own in zip(actions, self.actions, strict=True):
            for action in own:
                if isinstance(action, Compute) and action.kind in ("B", "BW"):
                    again = action._replace(kind="R")
                    made += [again] * ((action.stage, action.micro_batch) in which)
                made.append(action)
        return replace(self, actions=tuple(map(tuple, actions)))

    def runs_all_forwards_first(self, stage: int) -> bool:
        """Returns whether `stage` has all its forwards behind it before its first backward."""
        kinds = [a.kind for a in self.computations() if a.stage == stage and a.kind != "R"]
        forwards = kinds.count("F")
        return kinds[:forwards] == ["F"] * forwards

    def residual_changes(self, rank: int) -> Iterator[tuple[Compute, int]]:
        """Iterates over the computations after which a rank holds more or fewer residuals."""
        for action in self.actions[rank] if self.has_backward else ():
            if isinstance(action, Compute) and action.kind == "F":
                yield action, 1
            elif isinstance(action, Compute) and action in self._releases:
                yield action, -1

    @cached_property
    def _releases(self) -> frozenset[Compute]:
        """The computations after which the residuals of their micro-batch are free."""
        last: dict[tuple[int, int], Compute] = {}
        for action in self.computations():
            if action.kind != "F":
                last[action.stage, action.micro_batch] = action
        return frozenset(last.values())

    def first(self, num_micro_batches: int) -> Schedule:
        """Returns the same order for the first micro-batches alone, which stays legal."""
        if num_micro_batches == self.num_micro_batches:
            return self
        if num_micro_batches > self.num_micro_batches or self.is_lowered:
            raise ScheduleError(
                f"The schedule '{self.name}' has {self.num_micro_batches} micro-batches"
                f"{' and messages' if self.is_lowered else ''}. Received: "
                f"num_micro_batches={num_micro_batches}"
            )
        actions = tuple(
            tuple(a for a in own if isinstance(a, Compute) and a.micro_batch < num_micro_batches)
            for own in self.actions
        )
        return replace(self, num_micro_batches=num_micro_batches, actions=actions)

    def to_text(self) -> str:
        """Returns the schedule as text, which `from_text` reads as long as it has no messages."""
        header = {
            "schedule": self.name,
            "stages": str(self.num_stages),
            "micro_batches": str(self.num_micro_batches),
            "placement": " ".join(map(str, self.placement)),
        }
        if self.links is not None:
            header["links"] = _links_to_text(self.links)
            header["gradient_links"] = _links_to_text(self.gradient_links or ())
        if self.buckets:
            header["buckets"] = " ".join(map(str, self.buckets))
        lines = [f"{key}: {value}".rstrip() for key, value in header.items()]
        for rank, own in enumerate(self.actions):
            lines.append(f"rank {rank}: {' '.join(map(str, own))}".rstrip())
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, source: str) -> Schedule:
        """Reads a schedule from its text form.

        One line for each rank, and whatever follows a ``#`` is a comment::

            schedule: mine            # optional, like the other three of these lines
            stages: 2
            micro_batches: 2
            placement: 0 1            # the rank of each stage
            rank 0: 0F0 0F1 0BW0 0BW1
            rank 1: 1F0 1BW0 1F1 1BW1

        Numbers that are not given are taken from the computations. `lower` adds the messages.
        """
        lines: dict[str, Any] = {}
        for number, raw in enumerate(source.splitlines(), start=1):
            line = raw.split("#", 1)[0].strip()
            if not line:
                continue
            key, _, text = (" ".join(part.split()) for part in line.partition(":"))
            try:
                if key in lines:
                    raise ScheduleError(f"{key} is given twice. Received: {line!r}")
                lines[key] = _value(key, text)
            except (ScheduleError, ValueError) as error:  # Python reads 4300 digits at the most
                raise ScheduleError(f"Line {number} of the schedule: {error}") from None
        return cls(**_fields(lines))


def checked_placement(placement: Sequence[int], num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Refuses a placement that does not name a rank for each stage, or leaves one out."""
    if len(placement) != num_stages or set(placement) != set(range(num_ranks)):
        raise ScheduleError(
            f"Expected the rank of each of the {num_stages} stages, with every rank from 0 to "
            f"{num_ranks - 1}, and no other, in use. Received: placement={tuple(placement)}"
        )
    return tuple(placement)


def _links_to_text(links: Iterable[Link]) -> str:
    return " ".join(f"{source}>{target}" for source, target in links)


def _value(key: str, text: str) -> Any:
    words = text.split()
    if _RANK.fullmatch(key):
        actions = tuple(map(parse_action, words))
        for action in actions:
            if not isinstance(action, Compute):
                raise _expected("computations only, for the model says the messages", str(action))
        return actions
    if key not in _HEADERS:
        raise _expected(f"'rank N:' or one of {', '.join(_HEADERS)}", key)
    if key == "schedule":
        return text
    if not all(word.isdecimal() for word in words) or (key != "placement" and len(words) != 1):
        raise _expected("whole numbers, one for stages and micro_batches", text)
    return tuple(map(int, words)) if key == "placement" else int(words[0])


def _fields(lines: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the lines together, and takes from the actions what the others leave out."""
    given = [key for key in lines if _RANK.fullmatch(key)]
    names = [f"rank {rank}" for rank in range(len(given))]
    if not names or set(names) != set(given):
        raise _expected("one line for each rank: 'rank 0:', 'rank 1:', ...", ", ".join(given))
    actions: tuple[tuple[Compute, ...], ...] = tuple(lines[name] for name in names)
    # The first rank that computes a stage has it; if others do so, too, that is refused later.
    owners = {a.stage: rank for rank, own in reversed([*enumerate(actions)]) for a in own}
    micro_batches = {action.micro_batch for own in actions for action in own}
    if not owners:
        raise ScheduleError("Expected at least one computation. Received: none on any rank")
    stages = range(lines.get("stages", 1 + max(owners)))
    idle = next((stage for stage in stages if stage not in owners), None)
    if idle is not None and "placement" not in lines:
        raise ScheduleError(f"Expected computations of every stage. Stage {idle} has none")
    parts = range(lines.get("micro_batches", 1 + max(micro_batches)))
    if (missing := next((part for part in parts if part not in micro_batches), None)) is not None:
        raise ScheduleError(f"Expected computations of micro-batch {missing}. Received: none")
    return {
        "name": lines.get("schedule") or "custom",
        "num_stages": len(stages),
        "num_micro_batches": parts.stop,
        "num_ranks": len(names),
        "placement": lines.get("placement") or tuple(owners[stage] for stage in stages),
        "actions": actions,
    }


def _expected(what: str, received: str) -> ScheduleError:
    return ScheduleError(f"expected {what}. Received: {received!r}")
