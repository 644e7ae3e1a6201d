"""What of a rank only moves while it polls: its sends and its collectives, of all groups."""

from __future__ import annotations

from typing import Protocol

from tarantella_pp.runtime.comm.waiting.polling import Outgoing


class Sender(Protocol):
    """Has messages on their way out."""

    def progress(self) -> Outgoing:
        """Lets go of what has been sent; returns receiver and bytes of each message left."""


class Collective(Protocol):
    """Is under way."""

    @property
    def has_failed(self) -> bool:
        """Whether it has raised an error."""

    def ready(self) -> bool:
        """Does what can be done without waiting; returns whether nothing is left."""


class Progress:
    """Moves on what this rank has begun, in whatever group, while it waits or between other work.

    A rank that waits for an activation of its pipeline moves on the reduction of gradients among
    the replicas of a stage, and the other way around.

    Attributes:
        expected: How many messages this rank is ready to receive.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._senders: dict[int, Sender] = {}
        self._collectives: dict[int, Collective] = {}

    def is_open(self) -> bool:
        """Whether anything is under way."""
        return bool(self.expected or self._senders or self._collectives)

    def add_sender(self, sender: Sender) -> None:
        """Asks a sender from now on, until nothing of it is left."""
        self._senders[id(sender)] = sender

    def add_collective(self, collective: Collective) -> None:
        """Moves a collective on from now on, until it has ended."""
        self._collectives[id(collective)] = collective

    def drop_collective(self, collective: Collective) -> None:
        """Lets go of a collective that has ended, and with it of the memory of its result."""
        self._collectives.pop(id(collective), None)

    def poll(self) -> Outgoing:
        """Moves all on; returns receiver and bytes of each message that is not sent yet."""
        for key, collective in [*self._collectives.items()]:
            # Who waited for one that has failed knows it.
            if collective.has_failed or collective.ready():
                self._collectives.pop(key, None)
        if not self._senders:
            return ()
        outgoing: list[tuple[int, int]] = []
        for key, sender in [*self._senders.items()]:
            left = sender.progress()
            outgoing += left
            if not left:
                del self._senders[key]
        return outgoing
