"""`BackupAndRestore` on several ranks: one has the folder, all save and load what it asks for.

last rank   looks into the folder, asks ->  load_weights   -> go on with epoch 3
                                       |         |        |
rank 0      waits for what is asked    `->  load_weights   `-> go on with epoch 3
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tarantella_pp.errors import CommunicationError
from tarantella_pp.keras_internals.backups import (
    BackedUp,
    back_up,
    saves_on_batch,
    serving,
)
from tarantella_pp.keras_internals.epochs import start_epoch
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.one_rank import on_all_ranks, on_one_rank

_LOG = logging.getLogger(__name__)
_OPTIONS = ("backup_dir", "save_freq", "double_checkpoint", "delete_checkpoint")


class SharedBackup(keras.callbacks.Callback):
    """Lets one rank run a `BackupAndRestore`, and all ranks do what it asks of the model.

    What is in the folder, of which epoch it is, and whether it is damaged, that rank alone decides
    by Keras' own code. So ranks never go on from different epochs, and none sees a file that
    another one is writing or has just removed.
    """

    def __init__(self, backup: keras.callbacks.BackupAndRestore, ranks: Communicator) -> None:
        super().__init__()
        self._backup = backup
        self._ranks = ranks
        self._keeper = ranks.size - 1

    def set_model(self, model: Any) -> None:
        """Takes the model, also for the backup."""
        super().set_model(model)
        self._backup.set_model(model)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restores what there is."""
        options = {name: str(getattr(self._backup, name)) for name in _OPTIONS}
        with self._ranks.call("BackupAndRestore", **options):
            pass
        epoch = self._led("restore a backup", lambda: self._backup.on_train_begin(logs))
        if epoch is not None:
            start_epoch(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Backs up after so many batches, which each rank counts for itself."""
        if saves_on_batch(self._backup, batch):
            self._led("back up", lambda: back_up(self._backup))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Backs up after an epoch."""
        if self._backup.save_freq == "epoch":
            self._led("back up", lambda: self._backup.on_epoch_end(epoch, logs))
        else:
            self._backup.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Removes the folder."""
        self._led("remove the backup", lambda: self._backup.on_train_end(logs))

    def _led(self, what: str, work: Callable[[], None]) -> int | None:
        """Has one rank do something; all must call it, and do what it asks of the model."""
        model = BackedUp(self._ask)

        def lead() -> int | None:
            try:
                with serving(self._backup, model):
                    work()
            finally:
                self._ranks.broadcast_json(None, self._keeper)  # nothing more is asked for
            return model.first_epoch

        if self._ranks.rank != self._keeper:
            self._follow()
        epoch: int | None = on_one_rank(self._ranks, self._keeper, what, lead)
        return epoch

    def _ask(self, method: str, **arguments: Any) -> None:
        """Has all ranks call a method of the model."""
        self._ranks.broadcast_json([method, arguments], self._keeper)
        self._call(method, arguments)

    def _follow(self) -> None:
        """Calls what the one rank asks for; that one knows of failures, and tells in the end."""
        asked: Any
        while (asked := self._ranks.broadcast_json(None, self._keeper)) is not None:
            try:
                self._call(*asked)
            except CommunicationError:
                raise
            except Exception as error:
                _LOG.debug("left to rank %d: %s", self._keeper, error)

    def _call(self, method: str, arguments: Mapping[str, Any]) -> None:
        work = functools.partial(getattr(self.model, method), **arguments)
        on_all_ranks(self._ranks, f"call {method}", work)
