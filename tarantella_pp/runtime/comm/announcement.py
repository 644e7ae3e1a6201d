"""What ranks tell each other of the calls that they make, and how these may differ."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of one rank.

    Attributes:
        method: The method; empty for the end of the script.
        place: File and line of the user's script.
        facts: What must be the same on all ranks, as text.
    """

    method: str
    place: str = ""
    facts: dict[str, str] = {}

    def text(self, fact: str | None = None) -> str:
        """Names the call, with one of its facts."""
        argument = "" if fact is None else f"{fact}={self.facts.get(fact, 'nothing')}"
        return f"{self.method}({argument}) at {self.place}" if self.method else "the script's end"


END = CollectiveCall("")


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells another one about its call.

    Attributes:
        number: How many announcements there were before.
        call: The call.
        unfinished: Whether the rank has been in it for long, and another one keeps it waiting.
        broken: Why this rank can make no more calls; empty if it can.
        sent: How many messages the other rank was sent so far: group, tag, number.
        entered: How many collectives of each group this rank has entered.
    """

    number: int
    call: CollectiveCall
    unfinished: bool
    broken: str
    sent: list[tuple[int, int, int]]
    entered: dict[int, int]


def disagreement(said: Mapping[int, Announcement]) -> str:
    """Says how the calls of ranks differ, or why none of them can be made."""
    for told in said.values():
        if told.broken:
            return (
                f"No more calls are possible after {told.broken}: it came in the middle of a call, "
                "and what the other ranks have sent or trained meanwhile is not known. Start the "
                "script again, from what was saved last."
            )
    names = {told.call.method for told in said.values()}
    if len(names) > 1 or any(told.unfinished for told in said.values()):
        texts = {
            rank: told.call.text() + (", not finished," if told.unfinished else "")
            for rank, told in said.items()
        }
        return _refusal(texts)
    for fact in sorted({name for told in said.values() for name in told.call.facts}):
        if len({told.call.facts.get(fact) for told in said.values()}) > 1:
            return _refusal({rank: told.call.text(fact) for rank, told in said.items()})
    return ""


def _refusal(texts: Mapping[int, str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    received = "; ".join(
        f"{text} on rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
        for text, numbers in ranks.items()
    )
    return (
        f"All ranks must make the same calls. Received: {received}. Methods of a PipelineModel and "
        "`tnt.barrier()` take all ranks: none may stand behind `if tnt.is_master_rank()`, or in a "
        "callback that only some ranks have."
    )
