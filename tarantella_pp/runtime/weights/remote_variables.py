"""Variables that other ranks train: their value here is read only while it is the true one.

When it is no longer true, its memory is given back: a rank keeps the weights of its own stages::

    wrapped         step             get_weights()      step
    true value  ->  none, refuses -> true value     ->  none, refuses
                    `- while rank 3 writes a file, it reads the value from the owner
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from tarantella_pp.errors import ConfigurationError, StaleWeightError
from tarantella_pp.internals import state
from tarantella_pp.internals.parted import part_variable, parts_of, whole_of
from tarantella_pp.runtime.comm.buffers import give_back
from tarantella_pp.runtime.comm.tensor_buffers import to_tensor, variable_bytes
from tarantella_pp.runtime.weights.shared_weights import Array

OF_WEIGHTS = (
    "Weight '{path}' is of a stage on another rank, where a step may have changed it since. Call "
    "`get_weights()` of the PipelineModel on all ranks: it brings all weights of all layers up to "
    "date, until the next training step. Before a callback that reads it put, on all ranks, "
    "`keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.get_weights())`, or the same "
    "with the hook that reads."
)
OF_METRICS = (
    "Metric variable '{path}' is updated on another rank, and its value on this one is out of "
    "date. Take results from the `logs` that callbacks get and `train_on_batch` returns, the same "
    "on every rank; when an epoch or an evaluation has ended, every rank has the metrics, too."
)

OF_DEFERRED = (
    "Weight '{path}' was made under `deferred_init()` and has no value. Wrap its model in a "
    "PipelineModel: that gives each rank the values of its own stages."
)


class StepCounter:
    """Counts the steps of a pipeline, after which variables of other ranks are out of date."""

    def __init__(self, message: str = OF_WEIGHTS) -> None:
        self.message = message
        self.steps = 0
        self.readable: dict[int, _Remote] = {}  # those that have their true value till the next one
        self.written: set[int] = set()  # those whose values ranks have not compared

    def advance(self) -> None:
        """Counts a step: what other ranks train is out of date here, and needs no memory."""
        self.steps += 1
        for variable in self.readable.values():
            variable.drop(self.message)
        self.readable.clear()
        self.written.clear()


def read_with(read: Callable[[Any], Array]) -> contextlib.AbstractContextManager[None]:
    """Lets stale variables be read, one at a time, from where their true value is."""
    return state.meanwhile(_reader, read)


def only_own_assigned() -> contextlib.AbstractContextManager[None]:
    """Ignores assignments to other ranks' variables: these ranks assign the same."""
    return state.meanwhile(_only_own, True)


_only_own = contextvars.ContextVar("_only_own", default=False)
_reader: contextvars.ContextVar[Any] = contextvars.ContextVar("_reader", default=None)


def make_remote(variable: Any, clock: StepCounter) -> None:
    """Lets a variable refuse to be read after a step in which another rank trained it."""
    _become_remote(variable)
    variable._clocks[clock] = None
    if variable._stale:
        variable._stale = clock.message
    else:
        variable.has_true_value()


def make_deferred(variable: Any) -> None:
    """Lets a variable that was made without a value refuse to be read."""
    _become_remote(variable)
    variable._has_memory = False
    variable._stale = OF_DEFERRED


def initialize_deferred(variable: Any) -> None:
    """Gives a variable that was made without a value its first one."""
    if state.initializer_of(variable) is None:
        raise _error(variable)
    state.initialize(variable)
    variable.has_true_value()
    give_back(variable_bytes(variable))  # three times its size, of an initializer that draws


def keep_in_parts(variables: Iterable[Any]) -> None:
    """Has the parts among some variables take over what the user's have of them."""
    found: dict[int, list[Any]] = {}
    for variable in variables:
        found.setdefault(id(whole_of(variable)), []).append(variable)
    for parts in found.values():
        whole = whole_of(parts[0])
        if [*map(id, parts_of(whole))] == [*map(id, parts)]:
            continue
        if parts_of(whole)[0] is not whole:
            raise ConfigurationError(
                f"Stages of another PipelineModel train '{whole.path}', in parts of their own. "
                "Wrap a clone of the model, or pass the plan of that one."
            )
        for part in parts:
            make_deferred(part)
        value = None if is_stale(whole) else whole.numpy()
        part_variable(whole, parts)
        if value is not None:
            whole.assign(value)


def keep_memory(variable: Any) -> None:
    """Has a variable keep its memory, though it may be a remote one of another pipeline."""
    variable._used_here = True


def _become_remote(variable: Any) -> None:
    if not isinstance(variable, _Remote):
        variable._clocks = {}
        # The object stays, for the user's layers have it; only reading and assigning change.
        state.become(variable, _Remote, type(variable))


def let_go(variable: Any) -> None:
    """Drops a stale value."""
    for part in parts_of(variable):
        if isinstance(part, _Remote) and not hasattr(part, "_used_here"):
            part.drop(part._stale or OF_WEIGHTS)


def is_remote(variable: Any) -> bool:
    """Whether a variable's true value is on another rank, from the next step on at the latest."""
    return isinstance(variable, _Remote)


def is_stale(variable: Any) -> bool:
    """Whether another rank has trained a variable since this rank had its value."""
    return any(isinstance(part, _Remote) and part._stale for part in parts_of(variable))


def check_readable(variable: Any) -> None:
    """Refuses a stale variable, unless it can be read from where its true value is."""
    if _reader.get() is None:
        for part in filter(is_stale, parts_of(variable)):
            raise _error(part)


class _Remote(keras.Variable):  # type: ignore[misc]
    """A variable whose value is on another rank."""

    _clocks: dict[StepCounter, None]  # after whose next step its value is out of date
    _stale = ""  # why its value must not be read; empty while it is the true one
    _has_memory = True
    _used_here: bool

    @property
    def value(self) -> Any:
        """The value, which Keras asks for whenever it needs it."""
        if self._stale and not state.needs_only_shapes():
            check_readable(self)
            return to_tensor(_reader.get()(self))
        return super().value

    def assign(self, value: Any) -> Any:
        """Takes over a value, which is the true one from now on."""
        if state.needs_only_shapes() or tuple(np.shape(value)) != tuple(self.shape):
            return super().assign(value)  # which takes note of it, or names what does not fit
        # While a file is loaded on all ranks, each keeps its own part of it; a value for others
        # would fill the memory.
        if _only_own.get() and not hasattr(self, "_used_here"):
            let_go(self)
            return value
        if self._has_memory:
            super().assign(value)
        else:
            state.give_value(self, value)
        self.has_true_value()
        return value

    def has_true_value(self) -> None:
        """Takes note that the value is the true one by now."""
        self._has_memory = True
        self._stale = ""
        for clock in self._clocks:
            clock.readable[id(self)] = self
            clock.written.add(id(self))

    def drop(self, why: str) -> None:
        """Forgets the value, and gives its memory back unless a stage of this rank uses it."""
        self._stale = why
        if self._has_memory and not hasattr(self, "_used_here"):
            state.drop_value(self)
            self._has_memory = False

    def __repr__(self) -> str:
        if not self._stale:
            return str(super().__repr__())
        return (
            f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}, on other ranks>"
        )


def _error(variable: Any) -> StaleWeightError:
    return StaleWeightError(variable._stale.format(path=variable.path))
