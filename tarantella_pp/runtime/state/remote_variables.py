"""Variables that other ranks train: their value here is read only while it is the true one."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras

from tarantella_pp.errors import StaleWeightError
from tarantella_pp.keras_internals.state import needs_only_shapes

OF_WEIGHTS = (
    "Weight '{path}' is trained on another rank, and its value on this one is out of date. Call "
    "`get_weights()` of the PipelineModel on all ranks: it brings all weights of all layers up to "
    "date, until the next training step."
)
OF_METRICS = (
    "Metric variable '{path}' is updated on another rank, and its value on this one is out of "
    "date. Take results from the `logs` that callbacks get and steps by hand return, the same on "
    "every rank; when an epoch or an evaluation has ended, every rank has the metrics, too."
)


class Clock:
    """Counts the steps of a pipeline, after which variables of other ranks are out of date.

    Args:
        message: What to tell whoever reads one then, with its `{path}`.

    Attributes:
        steps: Their number.
    """

    def __init__(self, message: str = OF_WEIGHTS) -> None:
        self.message = message
        self.steps = 0


@contextlib.contextmanager
def only_traced() -> Iterator[None]:
    """Lets stale variables into graphs that are looked at and never run."""
    before = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(before)


_traced = contextvars.ContextVar("_traced", default=False)


def make_remote(variable: Any, clock: Clock) -> None:
    """Lets a variable refuse to be read after a step in which another rank trained it.

    It stays the same object, and is read again once it has been assigned a value.

    Args:
        variable: A Keras variable that this rank does not use.
        clock: That of the pipeline. A variable may be one of several pipelines.
    """
    if not isinstance(variable, _Remote):
        variable._seen = {}
        variable.__class__ = _remote_kind(type(variable))
    variable._seen[clock] = clock.steps


def is_stale(variable: Any) -> bool:
    """Whether another rank has trained a variable since this rank had its value."""
    return isinstance(variable, _Remote) and variable.is_stale


def refuse_stale(model: Any) -> None:
    """Refuses a model that cannot be read.

    Args:
        model: A Keras model.

    Raises:
        StaleWeightError: If another rank has trained one of its weights.
    """
    for variable in model.variables:
        if is_stale(variable):
            raise _error(variable)


class _Remote(keras.Variable):  # type: ignore[misc]
    """A variable whose value is on another rank."""

    _seen: dict[Clock, int]

    @property
    def is_stale(self) -> bool:
        """Whether a pipeline has made a step since the value was assigned."""
        return any(True for _ in self.passed())

    def passed(self) -> Iterator[Clock]:
        """The clocks that have gone on since the value was assigned."""
        return (clock for clock, seen in self._seen.items() if clock.steps != seen)

    @property
    def value(self) -> Any:
        """The value, which Keras asks for whenever it needs it.

        Raises:
            StaleWeightError: If it is no longer the true one.
        """
        if self.is_stale and not _traced.get() and not needs_only_shapes():
            raise _error(self)
        return super().value

    def assign(self, value: Any) -> Any:
        """Takes over a value, which is the true one from now on."""
        assigned = super().assign(value)
        self._seen.update({clock: clock.steps for clock in self._seen})
        return assigned

    def __repr__(self) -> str:
        if not self.is_stale:
            return str(super().__repr__())
        return (
            f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}, on other ranks>"
        )


def _error(variable: Any) -> StaleWeightError:
    return StaleWeightError(next(variable.passed()).message.format(path=variable.path))


_KINDS: dict[type, type] = {}


def _remote_kind(kind: type) -> type:
    """The class of remote variables of a class of variables."""
    if kind not in _KINDS:
        _KINDS[kind] = type(kind.__name__, (_Remote, kind), {})
    return _KINDS[kind]
