"""Which of Keras' callbacks run on which rank, and what they need there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tarantella_pp.callbacks.checkpoint import Checkpoint
from tarantella_pp.callbacks.lockstep import Lockstep
from tarantella_pp.callbacks.preparation import FolderMaker, WeightGatherer
from tarantella_pp.callbacks.resuming.preemption import Preemption, PreemptionVote
from tarantella_pp.callbacks.shared_backup import SharedBackup
from tarantella_pp.callbacks.timeline import Timeline
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator

# They write one file or send one report for the whole job.
_ONE_RANK = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# They change or stop training, or save the model.
_ALL_RANKS = (
    Checkpoint,
    Timeline,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)


def kinds_of_all_ranks(callbacks: Any) -> list[str]:
    """Names the callbacks that none may have alone, for all ranks must do as they do."""
    found = [c for c in listed(callbacks) if isinstance(c, _ALL_RANKS) or _looks_at_weights(c)]
    return sorted(type(callback).__name__ for callback in found)


def checkpoint_of(callbacks: Any) -> Checkpoint | None:
    """The `Checkpoint` among the callbacks of a call; `None` without one."""
    kinds = (Checkpoint, keras.callbacks.BackupAndRestore)
    found = [callback for callback in listed(callbacks) if isinstance(callback, kinds)]
    own = [callback for callback in found if isinstance(callback, Checkpoint)]
    if own and len(found) > 1:
        raise ConfigurationError(
            "A `fit` goes on from one directory. Received: callbacks "
            f"{', '.join(type(callback).__name__ for callback in found)}. Use one Checkpoint."
        )
    return own[0] if own else None


def callbacks_of_rank(
    callbacks: Any, model: Any, communicator: Communicator, preemption: Preemption | None = None
) -> Any:
    """Makes of the callbacks of a call those that this rank runs.

    What would be written once by every rank runs on the last one only. All others run on every
    rank, with the same logs: each rank stops early, or lowers its learning rate, at the same step.
    `ModelCheckpoint` is among them, because saving takes all ranks. In one process they are what
    they are in plain Keras. A `Checkpoint` comes last: it writes what the others have set.
    """
    checkpoint = checkpoint_of(callbacks)
    if communicator.size == 1 and checkpoint is None:
        return callbacks
    found = [callback for callback in listed(callbacks) if callback is not checkpoint]
    if communicator.size > 1:
        for callback in found:
            _check(callback)
        found = [ours for callback in found for ours in _of_rank(callback, communicator)]
        if preemption is not None:
            found.append(PreemptionVote(preemption))
        found.append(Lockstep(communicator))
    if checkpoint is not None:
        found.append(checkpoint)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return keras.callbacks.CallbackList(found, model=model, **callbacks.params)
    return found


def _of_rank(callback: Any, communicator: Communicator) -> Iterator[Any]:
    """What runs in place of a callback."""
    prints = communicator.rank == communicator.size - 1
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        yield SharedBackup(callback, communicator)
        return
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        yield FolderMaker(callback)
    if _looks_at_weights(callback):
        yield WeightGatherer(callback, follows=not prints)
    if prints or not isinstance(callback, _ONE_RANK):
        yield callback


def _check(callback: Any) -> None:
    """Refuses callbacks that would write what one process holds."""
    kind = type(callback)
    if isinstance(callback, getattr(keras.callbacks, "OrbaxCheckpoint", ())):
        raise ConfigurationError(
            f"Callback {kind.__name__} saves what one process holds, which is not "
            "the whole model on several ranks. Use keras.callbacks.ModelCheckpoint."
        )
    backup = keras.callbacks.BackupAndRestore
    if isinstance(callback, backup) and kind is not backup:
        raise ConfigurationError(
            f"Callback {kind.__name__} is a BackupAndRestore of your own, which would write one "
            "folder from several ranks at once. Use keras.callbacks.BackupAndRestore itself, and "
            "a second callback for what yours does besides."
        )


def _looks_at_weights(callback: Any) -> bool:
    """Whether a callback of one rank needs the weights of all."""
    is_board = isinstance(callback, keras.callbacks.TensorBoard)
    return is_board and bool(callback.histogram_freq or callback.embeddings_freq)


def listed(callbacks: Any) -> list[Any]:
    """The callbacks of a call."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [callback for callback in keras.tree.flatten(callbacks) if callback is not None]
