"""Which of Keras' callbacks run on which rank, and what keeps the ranks in step."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tarantella_pp.callbacks.checkpoint import Checkpoint
from tarantella_pp.callbacks.on_one_rank import OnOneRank
from tarantella_pp.callbacks.timeline import Timeline
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.data import keep_quiet, make_its_folder
from tarantella_pp.internals.optimizers import settable_learning_rate
from tarantella_pp.runtime.comm.communicator import Communicator, ranks_at_first

_TRACED = itertools.count(1)
_LOG = logging.getLogger(__name__)
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
    OnOneRank,
    Timeline,
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
    """The `Checkpoint` among the callbacks of a `fit`; `None` without one.

    Under `tarantella --restarts` a `fit` without one is refused: it would begin anew.
    """
    kinds = (Checkpoint, keras.callbacks.BackupAndRestore)
    found = [callback for callback in listed(callbacks) if isinstance(callback, kinds)]
    own = [callback for callback in found if isinstance(callback, Checkpoint)]
    if own and len(found) > 1:
        raise ConfigurationError(
            "A `fit` goes on from one directory. Received: callbacks "
            f"{', '.join(type(callback).__name__ for callback in found)}. Use one Checkpoint."
        )
    if not own and ranks_at_first():
        error = ConfigurationError(
            "A job that is started again goes on from a checkpoint. Received: `tarantella "
            "--restarts` and no Checkpoint among the callbacks of `fit`. Pass callbacks=["
            "tnt.callbacks.Checkpoint(directory)], or leave --restarts out."
        )
        error.is_final = True
        raise error
    return own[0] if own else None


def callbacks_of_rank(callbacks: Any, model: Any, checkpoint: Checkpoint | None = None) -> Any:
    """Makes of the callbacks of a call those that this rank runs, with the same logs on all."""
    communicator = model._engine.communicator
    if communicator.size == 1 and checkpoint is None:
        return callbacks
    found = [callback for callback in listed(callbacks) if not isinstance(callback, Checkpoint)]
    if communicator.size > 1:
        for callback in found:
            _check(callback)
        found = [ours for callback in found for ours in _of_rank(callback, model, communicator)]
        found.append(Lockstep(communicator, checkpoint))
    if checkpoint is not None:
        checkpoint.follow(found)
        found.append(checkpoint)  # the last one: it writes what the others have set
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return keras.callbacks.CallbackList(found, model=model, **callbacks.params)
    return found


def _of_rank(callback: Any, model: Any, communicator: Communicator) -> Iterator[Any]:
    """What runs in place of a callback."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        make_its_folder(callback)
    if _looks_at_weights(callback):
        yield _gathering(callback, model, follows=not communicator.prints)
    kind = next((kind for kind in _ONE_RANK if isinstance(callback, kind)), None)
    if kind is None or communicator.prints:
        yield callback
    elif type(callback) is not kind:
        keep_quiet(callback, kind)
        yield callback


def _check(callback: Any) -> None:
    """Refuses callbacks that would write what one process holds, and one rank for what all do."""
    inner = callback.callback if isinstance(callback, OnOneRank) else None
    if isinstance(inner, (*_ALL_RANKS, keras.callbacks.BackupAndRestore)):
        raise ConfigurationError(
            f"Callback {type(inner).__name__} stops training, sets a rate or saves, which takes "
            "all ranks. Pass it without OnOneRank."
        )
    if isinstance(callback, (keras.callbacks.BackupAndRestore, keras.callbacks.OrbaxCheckpoint)):
        raise ConfigurationError(
            f"Callback {type(callback).__name__} would write from several ranks what one process "
            "holds. Use tnt.callbacks.Checkpoint, with which `fit` goes on at the very step, or "
            "keras.callbacks.ModelCheckpoint."
        )


def _looks_at_weights(callback: Any) -> bool:
    """Whether a callback of one rank needs the weights of all."""
    is_board = isinstance(callback, keras.callbacks.TensorBoard)
    return is_board and bool(callback.histogram_freq or callback.embeddings_freq)


def with_trace(callbacks: Any, model: Any, environ: Mapping[str, str]) -> Any:
    """Adds the callback that `tarantella --trace FILE` asks for."""
    path = Path(environ.get("TNT_TRACE", ""))
    if not path.name:
        return callbacks
    if any(isinstance(callback, Timeline) for callback in listed(callbacks)):
        _LOG.warning("--trace %s is left out: the script has a Timeline of its own", path)
        return callbacks
    number = next(_TRACED)
    timeline = Timeline(path if number == 1 else path.with_stem(f"{path.stem}-{number}"))
    if isinstance(callbacks, keras.callbacks.CallbackList):
        timeline.set_model(model)
        callbacks.append(timeline)
        return callbacks
    return [*listed(callbacks), timeline]


def listed(callbacks: Any) -> list[Any]:
    """The callbacks of a call."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [callback for callback in keras.tree.flatten(callbacks) if callback is not None]


def _gathering(board: keras.callbacks.TensorBoard, model: Any, *, follows: bool) -> Any:
    """Does, before a `TensorBoard` or for it, what takes all ranks where it looks at weights."""

    def gather(epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if board.histogram_freq and epoch % board.histogram_freq == 0:
            model._engine.weights.gather()
        if follows and board.embeddings_freq and epoch % board.embeddings_freq == 0:
            name = f"keras_embedding.ckpt-{epoch}.weights.h5"
            model.save_weights(os.path.join(board.log_dir, "train", name))

    return keras.callbacks.LambdaCallback(on_epoch_end=gather)


# After each step every rank votes: whether it wants to stop, and its learning rate. The votes of
# the step before count, which have come ahead of this step's gradients, so that nobody waits. Only
# ranks that want to stop wait for the votes of this step: where all want to they stop at once, and
# where one does, all stop a step later.
class Lockstep(keras.callbacks.Callback):
    """Stops all ranks after the same step, and refuses learning rates that differ."""

    def __init__(self, communicator: Communicator, checkpoint: Checkpoint | None = None) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._communicator = communicator
        self._votes: Any = None  # on their way since the last step
        self._late = False  # whether one wanted to stop in the last step before validation

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether to stop training."""
        self._ask_to_stop()
        self._agree("stop_training")

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether to stop evaluating."""
        self._agree("stop_evaluating")

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether to stop predicting."""
        self._agree("stop_predicting")

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Counts the votes that training has left."""
        self._late = self._count()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Takes the votes of the last step, which come too late."""
        self._count()

    on_predict_end = on_test_end

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Agrees with the other ranks whether this epoch was the last; all come here together."""
        self._ask_to_stop()
        late, self._late = self._late or self._count(), False
        wish = late or bool(self.model.stop_training)
        given = self._communicator.allgather_json([wish, settable_learning_rate(self.model)])
        _refuse_other_rates([rate for _, rate in given])
        self.model.stop_training = any(wish for wish, _ in given)

    def _ask_to_stop(self) -> None:
        """Asks all ranks to stop if the checkpoint of this one has reason to."""
        if self._checkpoint is not None and self._checkpoint.must_stop():
            self.model.stop_training = True

    def _agree(self, name: str) -> None:
        """Sets one of the model's flags to what holds for all ranks."""
        stop = self._count(refuse=True)
        wish = bool(getattr(self.model, name))
        vote = np.array([[wish, settable_learning_rate(self.model)]], np.float64)
        tag = self._communicator.largest_tag // 2 - 1  # no sum of gradients has it
        self._votes = self._communicator.start_allgather([vote], tag=tag, label="whether to stop")
        if wish and not stop:
            stop = bool(self._votes.wait()[0][:, 0].all())
        setattr(self.model, name, stop)

    def _count(self, refuse: bool = False) -> bool:
        """Whether any rank wanted to stop in the last step, unless that was counted."""
        votes, self._votes = self._votes, None
        if votes is None:
            return False
        wishes, rates = votes.wait()[0].T
        if refuse:
            _refuse_other_rates(rates.tolist())
        return bool(wishes.any())


def _refuse_other_rates(rates: Sequence[float]) -> None:
    for rank, rate in enumerate(rates):
        if not np.array_equal(rate, rates[0], equal_nan=True):
            raise ConfigurationError(
                "All ranks must train at the same learning rate, each its own stages. Received: "
                f"learning_rate={rates[0]:g} on rank 0, learning_rate={rate:g} on rank {rank}. A "
                "callback that sets it must do so on every rank."
            )
