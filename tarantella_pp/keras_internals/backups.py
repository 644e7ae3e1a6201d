"""The private names of Keras that `BackupAndRestore` needs, all in this one file.

Written against Keras 3.14 and 3.15; `tests/keras_internals/test_backups.py` says which of them a
new version of Keras has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras


class BackedUp:
    """What a `BackupAndRestore` takes for its model: each file is somebody else's business.

    Attributes:
        built: Always true.
        optimizer: Always `None`, for a backup would build it for all weights.
    """

    built = True
    optimizer = None

    def __init__(self, ask: Callable[..., None]) -> None:
        self._ask = ask
        self._initial_epoch: int | None = None

    @property
    def first_epoch(self) -> int | None:
        """The epoch to go on with; `None` if there was no backup."""
        return self._initial_epoch

    def save_weights(self, filepath: Any, overwrite: bool = True) -> None:
        """Has the weights saved."""
        self._ask("save_weights", filepath=str(filepath), overwrite=overwrite)

    def load_weights(self, filepath: Any) -> None:
        """Has weights loaded."""
        self._ask("load_weights", filepath=str(filepath))


def saves_on_batch(backup: keras.callbacks.BackupAndRestore, batch: int) -> bool:
    """Counts a batch; returns whether a backup is due."""
    return bool(backup._should_save_on_batch(batch))


def back_up(backup: keras.callbacks.BackupAndRestore) -> None:
    """Makes a backup now."""
    backup._save_model()


@contextlib.contextmanager
def serving(backup: keras.callbacks.BackupAndRestore, instead: BackedUp) -> Iterator[None]:
    """Gives a backup something else for its model."""
    before = backup.model
    backup.set_model(instead)
    try:
        yield
    finally:
        backup.set_model(before)
