"""The text form of a schedule: a few header lines, then one line of actions for each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Action, Compute, Link, parse_action

_HEADERS = (
    *("schedule", "stages", "micro_batches", "placement"),
    *("links", "gradient_links", "buckets"),
)
_RANK = re.compile(r"rank\s+(\d+)")
_LINK = re.compile(r"(\d+)>(\d+)")


def write_text(header: Mapping[str, str], actions: Sequence[Sequence[Action]]) -> str:
    """Returns the text form of a schedule, from its header lines and the actions of each rank."""
    lines = [f"{key}: {value}".rstrip() for key, value in header.items()]
    for rank, own in enumerate(actions):
        lines.append(f"rank {rank}: {' '.join(map(str, own))}".rstrip())
    return "\n".join(lines) + "\n"


def read_text(source: str) -> dict[str, Any]:
    """Reads the text form of a schedule; returns the fields of a `Schedule`."""
    header: dict[str, tuple[int, str]] = {}
    ranks: dict[int, tuple[Action, ...]] = {}
    for number, raw in enumerate(source.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        key, colon, value = (part.strip() for part in line.partition(":"))
        found = _RANK.fullmatch(key)
        if not colon or (found is None and key not in _HEADERS):
            raise _error(number, f"expected 'rank N:' or one of {', '.join(_HEADERS)}", line)
        if found is None:
            if key in header:
                raise _error(number, f"{key} is given twice", line)
            header[key] = (number, value)
        elif int(found[1]) in ranks:
            raise _error(number, f"rank {found[1]} is given twice", line)
        else:
            ranks[int(found[1])] = _actions(number, value)
    return _fields(header, ranks)


def _fields(
    header: Mapping[str, tuple[int, str]], ranks: Mapping[int, tuple[Action, ...]]
) -> dict[str, Any]:
    """Puts the lines together, and takes from the actions what the header leaves out."""
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise ScheduleError(
            f"Expected one line for each rank: 'rank 0:', 'rank 1:', .... Received: {sorted(ranks)}"
        )
    owners: dict[int, int] = {}
    micro_batches = set()
    for rank, own in sorted(ranks.items()):
        for action in own:
            if isinstance(action, Compute):
                owners.setdefault(action.stage, rank)
                micro_batches.add(action.micro_batch)
    if not owners:
        raise ScheduleError("Expected at least one computation. Received: none on any rank")
    num_stages = _number(header, "stages", 1 + max(owners))
    if "placement" in header:
        placement = tuple(_numbers(*header["placement"]))
    else:
        idle = [stage for stage in range(num_stages) if stage not in owners]
        if idle:
            raise ScheduleError(f"Expected computations of every stage. Stage {idle[0]} has none")
        placement = tuple(owners[stage] for stage in range(num_stages))
    links = _links(header, "links")
    gradient_links = _links(header, "gradient_links")
    return {
        "name": header.get("schedule", (0, ""))[1] or "custom",
        "num_stages": num_stages,
        "num_micro_batches": _number(header, "micro_batches", 1 + max(micro_batches)),
        "num_ranks": len(ranks),
        "placement": placement,
        "actions": tuple(own for _, own in sorted(ranks.items())),
        "links": links,
        "gradient_links": links if gradient_links is None else gradient_links,
        "buckets": tuple(_numbers(*header["buckets"])) if "buckets" in header else (),
    }


def _actions(number: int, value: str) -> tuple[Action, ...]:
    """Reads the actions of one rank."""
    try:
        return tuple(parse_action(word) for word in value.split())
    except ScheduleError as error:
        raise ScheduleError(f"Line {number} of the schedule: {error}") from None


def _number(header: Mapping[str, tuple[int, str]], key: str, default: int) -> int:
    """Reads a header line of one number."""
    if key not in header:
        return default
    number, value = header[key]
    numbers = _numbers(number, value)
    if len(numbers) != 1:
        raise _error(number, f"expected one number for {key}", value)
    return numbers[0]


def _numbers(number: int, value: str) -> list[int]:
    """Reads whole numbers."""
    words = value.split()
    if not all(word.isdecimal() for word in words):
        raise _error(number, "expected whole numbers", value)
    return [int(word) for word in words]


def _links(header: Mapping[str, tuple[int, str]], key: str) -> tuple[Link, ...] | None:
    """Reads a header line of links."""
    if key not in header:
        return None
    number, value = header[key]
    links = []
    for word in value.split():
        found = _LINK.fullmatch(word)
        if found is None:
            raise _error(number, "expected links such as 0>1", value)
        links.append((int(found[1]), int(found[2])))
    return tuple(links)


def _error(number: int, expected: str, received: str) -> ScheduleError:
    """Makes the error that names a line."""
    return ScheduleError(f"Line {number} of the schedule: {expected}. Received: {received!r}")
