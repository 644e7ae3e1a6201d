"""Ideals of least cut: closures by maximum flow."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.solvers.problem.instance import Instance
from tarantella_pp.partition.solvers.problem.problem import FloatArray

_INFINITE = 1e300


class Flow:
    """A flow network for Dinic's algorithm (Soviet Math. Dokl. 11, 1970)."""

    def __init__(self, nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._head: list[int] = []
        self._room: list[float] = []

    def node(self) -> int:
        """Adds a node and returns its number."""
        self._arcs.append([])
        return len(self._arcs) - 1

    def arc(self, tail: int, head: int, room: float, back: float = 0.0) -> None:
        """Adds an arc with a capacity each way."""
        self._arcs[tail].append(len(self._head))
        self._arcs[head].append(len(self._head) + 1)
        self._head += [head, tail]
        self._room += [room, back]

    def run(self) -> float:
        """Pushes as much as fits from node 0 to node 1 and returns how much."""
        tiny = self._tiny()
        total = 0.0
        while True:
            level = self._levels(1, tiny, backward=True)
            if level[0] < 0:
                return total
            total += self._block(level, tiny)

    def _tiny(self) -> float:
        """Returns the room that counts as none."""
        return 1e-13 * max((room for room in self._room if room < _INFINITE / 2), default=0.0)

    def _levels(self, start: int, tiny: float, *, backward: bool) -> list[int]:
        """Returns each node's distance from one, or to it; -1 where there is no way."""
        level = [-1] * len(self._arcs)
        level[start] = 0
        head, room, turn = self._head, self._room, int(backward)
        queue = deque([start])
        while queue:
            node = queue.popleft()
            further = level[node] + 1
            for arc in self._arcs[node]:
                after = head[arc]
                if level[after] < 0 and room[arc ^ turn] > tiny:
                    level[after] = further
                    queue.append(after)
        return level

    def _block(self, level: list[int], tiny: float) -> float:
        """Pushes along shortest paths, by their distance to node 1, until none is left."""
        head, room, arcs = self._head, self._room, self._arcs
        pointer = [0] * len(arcs)
        path: list[int] = []
        node, total = 0, 0.0
        while True:
            if node == 1:
                pushed = min([room[arc] for arc in path])
                total += pushed
                full = 0
                for place, arc in enumerate(path):
                    room[arc] -= pushed
                    room[arc ^ 1] += pushed
                    if not full and room[arc] <= tiny:
                        full = place + 1
                # What lies before the first full arc is the begin of the next path.
                node = head[path[full - 1] ^ 1]
                del path[full - 1 :]
            at, closer = arcs[node], level[node] - 1
            for place in range(pointer[node], len(at)):
                arc = at[place]
                if level[head[arc]] == closer and room[arc] > tiny:
                    pointer[node] = place
                    path.append(arc)
                    node = head[arc]
                    break
            else:
                if not path:
                    return total
                pointer[node] = len(at)
                node = head[path.pop() ^ 1]
                pointer[node] += 1

    def source_side(self) -> list[bool]:
        """Tells for each node whether the source still reaches it after `run`."""
        return [level >= 0 for level in self._levels(0, self._tiny(), backward=False)]


def least_cut(
    instance: Instance,
    touch: FloatArray,
    inside: NDArray[np.bool_],
    outside: NDArray[np.bool_],
    price: FloatArray,
) -> tuple[float, NDArray[np.bool_]]:
    """Finds the ideal of least cut and price between two ideals.

    The nodes of the ideal are the source's side of a minimum cut; an arc of infinite capacity
    leads from each node to its predecessors, and each tensor is an arc (Picard, "Maximal
    closure of a graph", Management Science 22, 1976, with the hyperedge gadget of Lawler 1973).
    """
    free = np.flatnonzero(~(inside | outside)).tolist()
    number = {node: index + 2 for index, node in enumerate(free)}
    flow = Flow(len(free) + 2)
    constant = 0.0
    for node in free:
        cost = float(price[node])
        if cost > 0:
            flow.arc(number[node], 1, cost)
        elif cost < 0:
            flow.arc(0, number[node], -cost)
            constant += cost
        for before in instance.preds[node]:
            if before in number:
                flow.arc(number[node], number[before], _INFINITE)
    known_in, known_out = inside.tolist(), outside.tolist()
    for pins, cost in zip(instance.objective.terms.pins, touch.tolist(), strict=True):
        if cost > 0:
            constant += _tensor(flow, pins, cost, number, known_in, known_out)
    total = constant + flow.run()
    side = flow.source_side()
    member = inside.copy()
    for node in free:
        member[node] = side[number[node]]
    return total, member


def _tensor(
    flow: Flow,
    pins: tuple[int, ...],
    touch: float,
    number: dict[int, int],
    inside: list[bool],
    outside: list[bool],
) -> float:
    """Adds a tensor to the network; returns its cost where it is cut in any case."""
    known_in = known_out = False
    loose = []
    for pin in pins:
        if inside[pin]:
            known_in = True
        elif outside[pin]:
            known_out = True
        else:
            loose.append(number[pin])
    if known_in and known_out:
        return touch
    if not loose:
        return 0.0
    if len(loose) == 1:
        if known_in:
            flow.arc(0, loose[0], touch)
        elif known_out:
            flow.arc(loose[0], 1, touch)
        return 0.0
    if len(loose) == 2 and not (known_in or known_out):
        flow.arc(loose[0], loose[1], touch, touch)
        return 0.0
    gate = 0 if known_in else flow.node()
    exit_ = 1 if known_out else flow.node()
    if known_in:
        gate_out = flow.node()
        flow.arc(0, gate_out, touch)
        for pin in loose:
            flow.arc(gate_out, pin, _INFINITE)
        return 0.0
    for pin in loose:
        flow.arc(pin, gate, _INFINITE)
    flow.arc(gate, exit_, touch)
    if not known_out:
        for pin in loose:
            flow.arc(exit_, pin, _INFINITE)
    return 0.0
