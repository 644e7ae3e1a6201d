"""Weights and optimizer slots, which live on the ranks of their stages, brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.partition.extraction import ExtractedModel
from tarantella_pp.runtime.communicator import Communicator


class ModelState:
    """The variables of a model whose stages are on several ranks.

    Args:
        extracted: The model's graph and variables.
        assignment: Stage of each node.
        placement: Rank of each stage.
        communicator: The ranks of the pipeline.
    """

    def __init__(
        self,
        extracted: ExtractedModel,
        assignment: Sequence[int],
        placement: Sequence[int],
        communicator: Communicator,
    ) -> None:
        self._communicator = communicator
        users = extracted.graph.users(assignment)
        self._owned = [
            (variable, placement[stages[0]])
            for variable, stages in zip(extracted.variables, users, strict=True)
        ]

    def start_alike(self) -> None:
        """Gives every rank the first rank's values: initial weights and seeds."""
        for variable, _ in self._owned:
            self._share(variable, 0)

    def gather(self) -> None:
        """Gives every rank the value of each variable from the rank that trains it."""
        for variable, owner in self._owned:
            self._share(variable, owner)

    def full_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Makes the optimizer of the whole model out of those of the ranks.

        Args:
            optimizer: This rank's optimizer.
            variables: All trainable variables of the model, in its order.

        Returns:
            An optimizer with the slots of all variables, the same on every rank.

        Raises:
            UnsupportedModelError: If the optimizer's slots cannot be told apart by name.
        """
        if self._communicator.size == 1:
            return optimizer
        full = type(optimizer).from_config(optimizer.get_config())
        full.build(list(variables))
        own = _by_name(optimizer)
        places = self._communicator.allgather_json(sorted(own))
        for name, slot in _by_name(full).items():
            holders = [rank for rank, names in enumerate(places) if name in names]
            if name in own:
                slot.assign(own[name].value)
            if holders:
                self._share(slot, holders[0])
        return full

    def own_optimizer(self, optimizer: Any, full: Any) -> None:
        """Sets a rank's optimizer to its part of that of the whole model.

        Args:
            optimizer: This rank's optimizer.
            full: What `full_optimizer` made, with other values by now.
        """
        values = _by_name(full)
        for name, slot in _by_name(optimizer).items():
            slot.assign(values[name].value)

    def _share(self, variable: Any, root: int) -> None:
        if self._communicator.size == 1:
            return
        value = np.array(variable.numpy())  # a scalar would be no array
        self._communicator.broadcast(value, root)
        if self._communicator.rank != root:
            variable.assign(value)


def _by_name(optimizer: Any) -> Mapping[str, Any]:
    """Slots by what follows the optimizer's name in their path."""
    slots = {slot.path.split("/", 1)[-1]: slot for slot in optimizer.variables}
    if len(slots) < len(optimizer.variables):
        raise UnsupportedModelError(
            f"The slots of optimizer {type(optimizer).__name__} cannot be told apart by name, so "
            "they cannot be saved from several ranks. Pass `include_optimizer=False`."
        )
    return slots
