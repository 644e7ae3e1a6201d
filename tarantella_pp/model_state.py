"""The variables of a model, which are on the ranks of their stages, brought together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tarantella_pp.runtime.communicator import Communicator
from tarantella_pp.runtime.owners import Owners


class ModelState:
    """The variables of a model whose stages are on several ranks.

    They are known by their position in the model, the same on all ranks, and never by a name:
    Keras counts layers in each process, so a rank that made another model before has other names.

    Args:
        variables: All variables of the model, seeds of random layers included.
        owners: The ranks of the variables.
        communicator: The ranks of the pipeline.
    """

    def __init__(
        self, variables: Sequence[Any], owners: Owners, communicator: Communicator
    ) -> None:
        self._variables = tuple(variables)
        self._owners = owners
        self._communicator = communicator

    def start_alike(self) -> None:
        """Gives every rank the first rank's values: initial weights and seeds."""
        self._share(lambda variable: 0)

    def gather(self) -> None:
        """Gives every rank the value of each variable from the rank that trains it."""
        self._share(self._owners.owner)

    def _share(self, root_of: Callable[[Any], int]) -> None:
        if self._communicator.size == 1:
            return
        for variable in self._variables:
            root = root_of(variable)
            value = np.array(variable.numpy())  # a scalar would be no array
            self._communicator.broadcast(value, root)
            if self._communicator.rank != root:
                variable.assign(value)
