"""The smallest piece of a schedule: a computation of a stage, an end of a message, a reduction."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

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
    found = _COMPUTE.fullmatch(text)
    if found:
        return Compute(int(found[1]), found[2], int(found[3]))  # type: ignore[arg-type]
    found = _TRANSFER.fullmatch(text)
    if found:
        source, target, operation, direction, micro_batch = found.groups()
        return Transfer(int(source), int(target), operation, direction, int(micro_batch))  # type: ignore[arg-type]
    found = _REDUCE.fullmatch(text)
    if found:
        return Reduce(int(found[1]), int(found[2]))
    raise ScheduleError(
        "Expected an action: a computation such as 2F0, 1B3, 1W3 or 1BW3 (stage, kind, "
        "micro-batch), a message such as 0>1SF3 or 1>0RB3, or a reduction such as 2A0. "
        f"Received: {text!r}"
    )
