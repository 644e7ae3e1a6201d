"""Which of Keras' callbacks run on which rank."""

from __future__ import annotations

from typing import Any

import keras

from tarantella_pp.callbacks.timeline import Timeline
from tarantella_pp.errors import ConfigurationError

# They write one file or send one report for the whole job.
_ONE_RANK = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# They change or stop training, or save the model.
_ALL_RANKS = (
    Timeline,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
)
_REFUSED = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)


def kinds_of_all_ranks(callbacks: Any) -> list[str]:
    """Names the callbacks that none may have alone, for all ranks must do as they do.

    Args:
        callbacks: A callback, a list of them, Keras' own container of them, or `None`.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return sorted(
        type(callback).__name__
        for callback in keras.tree.flatten(callbacks)
        if isinstance(callback, _ALL_RANKS)
    )


def callbacks_of_rank(callbacks: Any, prints: bool) -> Any:
    """Leaves out what would be written once by every rank.

    All others run on every rank, with the same logs: each rank stops early, or lowers its
    learning rate, at the same step. `ModelCheckpoint` is among them, because saving takes all
    ranks.

    Args:
        callbacks: A callback, a list of them, Keras' own container of them, or `None`.
        prints: Whether this rank is the one that writes and prints.

    Returns:
        What to pass to Keras on this rank.

    Raises:
        ConfigurationError: If a callback would write a wrong file.
    """
    if callbacks is None or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    listed = keras.tree.flatten(callbacks)
    for callback in listed:
        if isinstance(callback, _REFUSED):
            raise ConfigurationError(
                f"Callback {type(callback).__name__} saves what one process holds, which is not "
                "the whole model here. Use keras.callbacks.ModelCheckpoint."
            )
    return [c for c in listed if prints or not isinstance(c, _ONE_RANK)]
