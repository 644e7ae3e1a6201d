"""What actions mean to each other: messages, reductions, all ranks walking through their lists."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Action, Compute, Link, Message, Reduce, Transfer


def check_links(
    num_stages: int, links: Iterable[Link] | None, gradient_links: Iterable[Link] | None
) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Returns links and gradient links, checked, sorted and each once, with their defaults."""
    if links is None:
        links = [(stage, stage + 1) for stage in range(num_stages - 1)]
    forward = tuple(sorted(set(links)))
    for source, target in forward:
        if not 0 <= source < target < num_stages:
            raise ScheduleError(
                f"Expected links from a stage to a later one, of stages 0 to {num_stages - 1}. "
                f"Received: links with {source}>{target}"
            )
    backward = forward if gradient_links is None else tuple(sorted(set(gradient_links)))
    for source, target in backward:
        if (source, target) not in forward:
            raise ScheduleError(
                "Expected gradients to flow over links that carry activations. Received: "
                f"gradient_links with {source}>{target}, links={forward}"
            )
    return forward, backward


class Routes:
    """The messages that a computation needs and makes, as pairs of sending and receiving stage."""

    def __init__(self, links: Iterable[Link], gradient_links: Iterable[Link]) -> None:
        self._needed: defaultdict[tuple[str, int], list[Link]] = defaultdict(list)
        self._made: defaultdict[tuple[str, int], list[Link]] = defaultdict(list)
        backward = [("B", target, source) for source, target in reversed(list(gradient_links))]
        for kind, source, target in [*(("F", *link) for link in links), *backward]:
            self._needed[kind, target].append((source, target))
            self._made[kind, source].append((source, target))

    def inputs(self, action: Compute) -> list[Link]:
        """Returns the links whose messages `action` needs; W needs none."""
        return self._needed[action.kind[0], action.stage]

    def outputs(self, action: Compute) -> list[Link]:
        """Returns the links whose messages `action` makes; W makes none."""
        return self._made[action.kind[0], action.stage]


def reductions(placement: Sequence[int], buckets: Sequence[int], rank: int) -> tuple[Reduce, ...]:
    """Returns the reductions of a rank in the order in which every replica starts them.

    The last stage comes first, for its gradients are there first. The order depends on nothing
    else, so replicas agree whatever their numbers of micro-batches; one that has none of a small
    batch runs these actions alone, with gradients of zero.
    """
    # The last stage is through its backward passes first.
    counts = list(enumerate(buckets))[::-1]
    return tuple(
        Reduce(stage, bucket)
        for stage, count in counts
        if placement[stage] == rank
        for bucket in range(count)
    )


class StartingReductions:
    """Says when which reductions of a rank start, while its computations go by.

    Each starts as soon as its stage has its last weight gradient and those before it in the order
    have started. Two stages on a rank; the lower one is done first::

        0BW3                2BW3
             nothing starts      2R0 2R1 0R0 start
    """

    def __init__(self, order: Sequence[Reduce], actions: Sequence[Action]) -> None:
        self._left = list(order)[::-1]
        self._weight_gradients = Counter(
            a.stage for a in actions if isinstance(a, Compute) and a.kind in ("W", "BW")
        )

    def after(self, action: Compute) -> Iterator[Reduce]:
        """Yields the reductions that start behind a computation."""
        if action.kind in ("W", "BW"):
            self._weight_gradients[action.stage] -= 1
        while self._left and not self._weight_gradients[self._left[-1].stage]:
            yield self._left.pop()


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

    def reduce(self, rank: int, action: Reduce) -> None:
        """Is called when a reduction starts."""

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
            elif isinstance(action, Reduce):
                self.reduce(rank, action)
            elif action.operation == "S":
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
        """Posts a receive and wakes its sender."""
        self._posted.add(receive.message)
        self._wake(receive.message)

    def _wake(self, message: Message) -> None:
        """Lets the rank go on that waits for a message, if there is one."""
        rank = self._waiting.pop(message, None)
        if rank is not None:
            self._runnable.append(rank)


def _key(action: Compute) -> tuple[int, str, int]:
    """Returns under which key the messages that `action` needs are expected."""
    return (action.stage, action.kind[0], action.micro_batch)
