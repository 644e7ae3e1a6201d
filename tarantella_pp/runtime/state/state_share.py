"""All that training changes, under keys that are the same on any number of ranks.

    model/3        the fourth variable of the model: weight, statistics, seed
    optimizer/5    the sixth of the whole optimizer, as plain Keras saves it
    metric/0       of the metrics, once a batch has made them

Each key is told by one rank, which writes it, and read by those that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tarantella_pp.runtime.comm.tensor_buffers import variable_dtype
from tarantella_pp.runtime.state.optimizer_state import OptimizerState
from tarantella_pp.runtime.state.variable_sync import VariableSync


class StateShare:
    """One rank's share of the state of training."""

    def __init__(
        self,
        variables: VariableSync,
        optimizer: OptimizerState | None,
        metrics: Callable[[], list[tuple[Any, bool]]],
        speaks: bool,
    ) -> None:
        self._variables = variables
        self._optimizer = optimizer
        self._metrics = metrics
        self._speaks = speaks

    def owned(self) -> dict[str, Any]:
        """What this rank writes."""
        found = _keyed("model", self._variables.owned())
        if self._optimizer is not None:
            found |= _keyed("optimizer", self._optimizer.owned())
        if self._speaks:
            found |= self.metrics()
        return found

    def needed(self) -> dict[str, Any]:
        """What this rank must read, but for metrics."""
        found = _keyed("model", self._variables.needed())
        if self._optimizer is not None:
            found |= _keyed("optimizer", self._optimizer.needed())
        return found

    def metrics(self) -> dict[str, Any]:
        """The variables of metrics that this rank updates; none before the first batch."""
        pairs = enumerate(self._metrics())
        return _keyed("metric", {i: variable for i, (variable, mine) in pairs if mine})


def spec_of(variable: Any) -> tuple[str, tuple[int, ...]]:
    """Name of the dtype of a variable, and its shape."""
    return variable_dtype(variable).name, tuple(variable.shape)


def _keyed(kind: str, found: Mapping[int, Any]) -> dict[str, Any]:
    return {f"{kind}/{number}": variable for number, variable in found.items()}
