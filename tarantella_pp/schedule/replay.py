"""All ranks walk through their lists: who waits for whom, and how far all of them get."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.schedule.actions import Action, Compute, Message, Transfer


class Replay:
    """Plays the actions of all ranks; the one place that knows what they mean to each other.

    The communication between two computations of a rank is one exchange; its receives are posted
    when the rank enters it::

        0F0   0>1SF0 1>0RB0   0BW0   0>1SF1 ...
              `-- exchange -'
              1>0RB0 is posted here, before the send is reached

    The lists say who comes next, so no clock is needed: each rank goes as far as it can, and goes
    on when what it waits for has come. (`ListScheduler` plays ranks that have to choose.)

    * With sends that block, as MPI's large ones may, a send waits until its receive is posted,
      and a receive waits where it stands until its send is reached. Lists that get through so
      get through with any kind of send.
    * Otherwise, as in the runtime, sends go on by themselves, and a receive is waited for by the
      computation that needs it.
    * A reduction only starts where it stands, so it never waits.
    """

    def __init__(self, programs: Sequence[Sequence[Action]], *, blocking: bool) -> None:
        self.programs = [list(program) for program in programs]
        self.position = [0] * len(programs)
        self.blocking = blocking
        self._posted: set[Message] = set()
        self._sent: set[Message] = set()
        self._expected: dict[tuple[int, str, int], list[Transfer]] = {}
        self._waiting: dict[Message, int] = {}
        self._runnable = list(range(len(programs)))
        for rank in range(len(programs)):
            self._enter_exchange(rank)

    def run(self) -> list[int]:
        """Lets every rank go as far as it can."""
        while self._runnable:
            self._walk(self._runnable.pop())
        return [rank for rank, own in enumerate(self.programs) if self.position[rank] < len(own)]

    def hoist(self, receive: Transfer, rank: int) -> None:
        """Moves a receive of a stuck rank forward, to the end of the exchange it is stuck in."""
        program = self.programs[rank]
        # Behind the sends that block, yet in the same exchange: its receives are posted when the
        # rank enters it, so the sender of this one can go on.
        old = program.index(receive, self.position[rank])
        new = self.position[rank]
        while not isinstance(program[new], Compute):
            new += 1
        program.insert(new, program.pop(old))
        self._post(receive)

    def compute(self, rank: int, action: Compute) -> None:
        """Is called for each computation; a replay with a clock adds its time."""

    def send(self, rank: int, action: Transfer) -> None:
        """Is called when a send gets through."""

    def receive(self, rank: int, action: Transfer) -> None:
        """Is called when a receive gets through."""

    def _walk(self, rank: int) -> None:
        """Lets one rank go as far as it can, and notes for what it waits then."""
        program = self.programs[rank]
        while self.position[rank] < len(program):
            action = program[self.position[rank]]
            missing = self._missing(action)
            if missing is not None:
                self._waiting[missing] = rank
                return
            self.position[rank] += 1
            if isinstance(action, Compute):
                # In the runtime a receive is waited for here, not where it was posted.
                for receive in self._expected.pop(_key(action), ()):
                    self.receive(rank, receive)
                self.compute(rank, action)
                self._enter_exchange(rank)
            elif isinstance(action, Transfer):
                self._transfer(rank, action)

    def _transfer(self, rank: int, action: Transfer) -> None:
        if action.operation == "S":
            self.send(rank, action)
            self._sent.add(action.message)
            self._wake(action.message)
        elif self.blocking:
            self.receive(rank, action)
        else:
            key = (action.target, action.direction, action.micro_batch)
            self._expected.setdefault(key, []).append(action)

    def _missing(self, action: Action) -> Message | None:
        """Returns a message for which `action` has to wait, or None."""
        if isinstance(action, Compute):
            for receive in self._expected.get(_key(action), ()):
                if receive.message not in self._sent:
                    return receive.message
        elif isinstance(action, Transfer) and self.blocking:
            # A blocking send ends when its receive is posted, a receive when its send is reached.
            ready = self._posted if action.operation == "S" else self._sent
            if action.message not in ready:
                return action.message
        return None

    def _enter_exchange(self, rank: int) -> None:
        """Posts the receives up to the next computation."""
        program = self.programs[rank]
        for index in range(self.position[rank], len(program)):
            action = program[index]
            if isinstance(action, Compute):
                return
            if isinstance(action, Transfer) and action.operation == "R":
                self._post(action)

    def _post(self, receive: Transfer) -> None:
        self._posted.add(receive.message)
        self._wake(receive.message)

    def _wake(self, message: Message) -> None:
        """Lets the rank go on that waits for a message, if there is one."""
        rank = self._waiting.pop(message, None)
        if rank is not None:
            self._runnable.append(rank)


def _key(action: Compute) -> tuple[int, str, int]:
    return (action.stage, action.kind[0], action.micro_batch)
