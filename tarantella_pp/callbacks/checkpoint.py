"""`Checkpoint`: writes the whole state of training, and lets `fit` go on from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, checked_count


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints, and lets `fit` go on from the newest one there is.

    The first time, `fit` finds an empty directory and trains. When the job has died and is started
    again, the same script, unchanged, goes on where the newest checkpoint was written, in the
    middle of an epoch too, to the same losses, metrics and weights; on any number of stages and
    replicas, or in one process. Each rank writes what it owns into a file of its own: weights,
    optimizer state, seeds. A checkpoint counts once all of it is on the disk.

    A directory belongs to one run: a model, an optimizer, data. If one of them is another now,
    `fit` refuses to go on, and says which. When `epochs` are reached, it trains nothing, and warns.

    On SIGTERM, with which clusters announce that they need the machine, the step in hand is
    finished, a checkpoint written, and all ranks end with exit code 75.

    Args:
        directory: Where checkpoints are, on a disk that all ranks see. It is made.
        every: `"epoch"`, or after how many steps one is written. One is written at the end of
            training in any case. Default: `"epoch"`.
        keep: How many of the newest stay. Default: 2.

    Raises:
        ConfigurationError: If an argument cannot be right.

    Example::

        model.fit(x, y, epochs=10, callbacks=[tnt.callbacks.Checkpoint("checkpoints")])
    """

    def __init__(
        self, directory: str | os.PathLike[str], every: int | str = "epoch", keep: int = 2
    ) -> None:
        super().__init__()
        if not isinstance(directory, (str, os.PathLike)) or not str(directory):
            raise ConfigurationError(
                f"Expected the path of a directory. Received: directory={directory!r}"
            )
        if isinstance(every, str) and every != "epoch":
            raise ConfigurationError(
                f"Expected a number of steps, or 'epoch'. Received: every={every!r}"
            )
        self.directory = Path(os.path.abspath(directory))
        self.every = every if every == "epoch" else checked_count("every", every)
        self.keep = checked_count("keep", keep)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Refuses a model of plain Keras; others have a `CheckpointRun` do the work."""
        raise ConfigurationError(
            "tnt.callbacks.Checkpoint saves models of this library. Received: a "
            f"{type(self.model).__name__}. Wrap it, tnt.PipelineModel(model), or use "
            "keras.callbacks.BackupAndRestore."
        )
