"""What Keras' callbacks need from all ranks before one of them, or each, goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras


class FolderMaker(keras.callbacks.Callback):
    """Makes the folder of a `ModelCheckpoint`, which itself fails where another rank is quicker.

    It stands before the checkpoint in the list.
    """

    def __init__(self, checkpoint: keras.callbacks.ModelCheckpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Notes the epoch, which a path may name."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Makes the folder of a checkpoint that is written every so many batches."""
        if self._checkpoint.save_freq != "epoch":
            self._make({"batch": batch + 1, **(logs or {})})

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Makes the folder of a checkpoint that is written once an epoch."""
        if self._checkpoint.save_freq == "epoch":
            self._make(logs or {})

    def _make(self, logs: Mapping[str, Any]) -> None:
        with contextlib.suppress(KeyError):  # the checkpoint says better what is missing
            path = Path(self._checkpoint.filepath.format(epoch=self._epoch + 1, **logs))
            path.parent.mkdir(parents=True, exist_ok=True)


class WeightGatherer(keras.callbacks.Callback):
    """Gathers the weights on all ranks at the end of the epochs in which a `TensorBoard` looks.

    It stands before the board in the list, and for it on ranks that have none.
    """

    def __init__(self, board: keras.callbacks.TensorBoard, follows: bool) -> None:
        super().__init__()
        self._board = board
        self._follows = follows

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Does what takes all ranks."""
        board = self._board
        if board.histogram_freq and epoch % board.histogram_freq == 0:
            self.model._model_state.gather()
        if self._follows and board.embeddings_freq and epoch % board.embeddings_freq == 0:
            name = f"keras_embedding.ckpt-{epoch}.weights.h5"
            self.model.save_weights(os.path.join(board.log_dir, "train", name))
