"""The variables of a model, which are on the ranks of their stages, brought together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import value_of, variable_dtype
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.state.owners import Owners
from tarantella_pp.runtime.state.remote_variables import (
    Clock,
    initialize_deferred,
    is_stale,
    keep_memory,
    make_remote,
)
from tarantella_pp.runtime.state.value_stream import ValuePieces, ValueStream


class VariableSync:
    """The variables of a model whose stages are on several ranks.

    They are known by their position in the model, the same on all ranks, and never by a name:
    Keras counts layers in each process, so a rank that made another model before has other names.
    Those that only other ranks use refuse to be read here once these have trained them.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        owners: Owners,
        groups: ProcessGroups,
        clock: Clock,
    ) -> None:
        self._variables = tuple(variables)
        self._owners = owners
        self._communicator = communicator = groups.pipeline
        self._peers = groups.peers
        self._used = []
        for i, variable in enumerate(variables):
            ranks = owners.ranks(variable)
            if communicator.rank in ranks:
                self._used.append(i)
                keep_memory(variable)
            elif ranks:
                make_remote(variable, clock)

    def start_alike(self) -> None:
        """Gives every rank the first rank's values: initial weights and seeds.

        Where another pipeline has trained a variable, it gives the true value. Variables that were
        made without values get them on the ranks that use them, the same everywhere.
        """
        everywhere = self._communicator.allgather_json(self._stale())
        deferred = set(everywhere[0]).intersection(*everywhere[1:])
        for i in deferred:
            if i in self._used or not self._owners.ranks(self._variables[i]):
                initialize_deferred(self._variables[i])
        self._share(lambda variable: 0, everywhere, set(range(len(self._variables))) - deferred)
        for i, variable in enumerate(self._variables):
            if i not in deferred or i in self._used:
                broadcast_variable(variable, 0, self._peers)

    def gather(self) -> None:
        """Gives every rank the value of each variable from the rank that trains it."""
        self._share(self._owners.owner, self._communicator.allgather_json(self._stale()))

    def refresh(self) -> None:
        """Brings up to date what stages use and another pipeline has trained on another rank."""
        if self._communicator.size == 1:
            return
        needed = [i for i in self._used if is_stale(self._variables[i])]
        needed_by = self._communicator.allgather_json(needed)
        if any(needed_by):
            stale = self._communicator.allgather_json(self._stale())
            self._share(self._owners.owner, stale, set().union(*needed_by))

    def reader(self, stream: ValueStream) -> Callable[[Any], ValuePieces]:
        """Lets a rank read variables that it has not, one at a time; all ranks must call it."""
        self.refresh()
        numbers = {id(variable): i for i, variable in enumerate(self._variables)}
        read = stream.add(self._variables.__getitem__)

        def read_variable(variable: Any) -> ValuePieces:
            owner = self._communicator.world_ranks[self._owners.owner(variable)]
            spec = TensorSpec(tuple(variable.shape), variable_dtype(variable))
            return read(owner, numbers[id(variable)], spec)

        return read_variable

    @property
    def variables(self) -> tuple[Any, ...]:
        """All variables of the model, in an order that is the same on all ranks."""
        return self._variables

    def owned(self) -> dict[int, Any]:
        """The variables that this rank tells of for all, by their position."""
        if self._peers.rank:
            return {}
        rank = self._communicator.rank
        return {i: v for i, v in enumerate(self._variables) if self._owners.owner(v) == rank}

    def needed(self) -> dict[int, Any]:
        """The variables that this rank must have, by their position."""
        own = set(self._used)
        return {
            i: v for i, v in enumerate(self._variables) if i in own or not self._owners.ranks(v)
        }

    def _stale(self) -> list[int]:
        return [i for i, variable in enumerate(self._variables) if is_stale(variable)]

    def _share(
        self,
        root_of: Callable[[Any], int],
        stale: Sequence[Sequence[int]],
        which: Iterable[int] | None = None,
    ) -> None:
        """Gives all ranks values, of some variables or of all, from a rank that has true ones."""
        if self._communicator.size == 1:
            return
        for i in range(len(self._variables)) if which is None else sorted(which):
            variable = self._variables[i]
            true = [rank for rank, theirs in enumerate(stale) if i not in theirs]
            root = root_of(variable)
            root = root if root in true else true[0]
            broadcast_variable(variable, root, self._communicator)


def broadcast_variable(variable: Any, root: int, ranks: Communicator) -> None:
    """Gives all ranks the value that a variable has on one of them; all of them must call it."""
    if ranks.size == 1:
        return
    if ranks.rank == root:
        value = value_of(variable)
    else:  # where it may not be read
        value = np.empty(tuple(variable.shape), variable_dtype(variable))
    ranks.broadcast(value, root)
    if ranks.rank != root:
        variable.assign(value)
