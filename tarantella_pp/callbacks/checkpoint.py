"""`Checkpoint`: writes the whole state of training, and lets `fit` go on from there."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import os
import signal
import sys
import threading
import types
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.callbacks import checkpoint_reader
from tarantella_pp.callbacks.checkpoint_folder import DataPosition, Manifest
from tarantella_pp.callbacks.checkpoint_writer import CheckpointWriter
from tarantella_pp.errors import ConfigurationError, checked_count
from tarantella_pp.internals import data
from tarantella_pp.internals.functional import stateful_layers
from tarantella_pp.internals.optimizers import settable_learning_rate, wrapped_in

logger = logging.getLogger(__name__)
# EX_TEMPFAIL: start it again; `tarantella` ends so, too, when SIGTERM has stopped a job.
EXIT_CODE = 75


# When it writes (W), with `every=2` and epochs of three steps:
#
#   step 1   2   3 | validation | 4   5   6 | validation
#            W                    W      due             W
#
# A checkpoint that is due at the last step of an epoch waits for the epoch's end: the epoch is
# counted there, and what callbacks do with its logs belongs into the checkpoint.
class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints, and lets `fit` go on from the newest one there is.

    The first time, `fit` finds an empty directory and trains. When the job has died and is started
    again, the same script, unchanged, goes on where the newest checkpoint was written, in the
    middle of an epoch too, to the same losses, metrics and weights; on any number of stages and
    replicas, or in one process. Each rank writes what it owns into a file of its own: weights,
    optimizer state, seeds. It does so while training goes on, from a copy in memory if there is
    room. A checkpoint counts once all of it is on the disk; the last one is when `fit` returns.

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
        self.preempted = False  # whether SIGTERM has asked this rank to end
        self._adapter: Any = None  # reads the data of the `fit` in hand

    def begin(
        self,
        model: Any,
        adapter: Any,
        *,
        initial_epoch: int,
        epochs: int,
        steps_per_epoch: int | None,
        shuffle: bool,
    ) -> None:
        """Prepares for one `fit` of a model of this library, behind all other callbacks."""
        engine = model._engine
        self.preempted = False
        self._model = model
        self._adapter = adapter
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._shuffle = shuffle
        self._callbacks: dict[str, Any] = {}
        self._ranks = engine.communicator
        stages = sorted(engine.stages)
        self._writer = CheckpointWriter(self._ranks, self.directory, self.keep, stages)
        self._share = model._state_share()
        self._facts: dict[str, Any] = {}
        self._configs: dict[str, Any] = {}
        self._history: dict[str, list[Any]] = {}
        self._restored: checkpoint_reader.RestoredState | None = None
        self._step = self._epoch_step = 0
        self._epoch = self._initial_epoch = initial_epoch
        self._epoch_length: int | None = None
        self._written = (-1, -1)  # step and epochs of the last one
        self._due = self._cut = False

    def follow(self, callbacks: Iterable[Any]) -> None:
        """Takes over the state of other callbacks, by class and number within the class."""
        counts: Counter[str] = Counter()
        for callback in filter(data.remembers, callbacks):
            kind = type(callback).__name__
            self._callbacks[f"{kind}#{counts[kind]}"] = callback
            counts[kind] += 1

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Surrounds Keras' own `fit`."""
        try:
            with self._noting_sigterm(), data.starting_anywhere(self._model):
                yield
        finally:
            self._writer.abandon()
            self._adapter.start = self._adapter = None
            self._model._engine.before_training = None

    @contextlib.contextmanager
    def _noting_sigterm(self) -> Iterator[None]:
        """Notes SIGTERM, also twice; what came too late to be acted upon takes effect after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: types.FrameType | None) -> None:
            self.preempted = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
        if self.preempted:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Goes on from the newest checkpoint, or begins; takes all ranks."""
        if self._adapter is None:
            raise ConfigurationError(
                "tnt.callbacks.Checkpoint saves models of this library; one with steps of its own "
                f"is plain Keras in one process. Received: a {type(self.model).__name__}. Wrap it, "
                "tnt.PipelineModel(model), or use keras.callbacks.BackupAndRestore."
            )
        options = {"directory": str(self.directory), "every": self.every, "keep": self.keep}
        with self._ranks.call("Checkpoint", **options):
            pass  # the same on all ranks
        self._configs = checkpoint_reader.configs_of(self._model)
        adapter = self._adapter  # which knows the data on the rank that reads them
        read = {"contents": adapter.description, "batches": adapter.num_batches}
        read |= {"steps_per_epoch": self._steps_per_epoch, "shuffle": self._shuffle}
        read |= {} if adapter.cursor is None else adapter.cursor.facts()
        self._facts = self._ranks.broadcast_json(checkpoint_reader.facts_of(self._model, read))
        found = checkpoint_reader.newest_whole(self._ranks, self.directory)
        trains = True
        if found is not None:
            folder, manifest = found
            config, rate = self._configs["config"], _learning_rate_of(self._model)
            checkpoint_reader.refuse_others(manifest, self._facts, config, rate, str(folder))
            trains = self._go_on(folder, manifest)
        if trains:
            self._writer.prepare()
            self._model._engine.before_training = self._share.metrics

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Undoes what the beginning of an epoch has changed that had begun before."""
        restored = self._completed_history()
        if restored is None or not self._epoch_step:
            return
        saved, engine = restored.manifest, self._model._engine
        if saved.learning_rate is not None:  # schedules have set the rate of the epoch
            wrapped_in(self._model.optimizer).learning_rate = saved.learning_rate
        engine.logs = dict(saved.logs)  # which stay if no batch follows
        # The first batch makes the variables of metrics.
        engine.before_training = lambda: restored.assign(self._share.metrics())
        self._remind(saved)  # on_epoch_begin may have reset them

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Writes after a step, if it is time to."""
        before, self._step = self._step, self._step + batch + 1 - self._epoch_step
        self._epoch_step = batch + 1
        self._ranks.note(step=self._step)
        due = self.every != "epoch" and self._step // int(self.every) > before // int(self.every)
        length = self._epoch_length or self.params.get("steps")
        if length is not None and batch + 1 >= length:  # the end of the epoch follows
            self._due = due
            return
        # `Lockstep` has all ranks stop after the same step, so that all of them come to ask why.
        stops = self._stops()
        preempted = stops and self._any_preempted()
        if due or stops:
            self._write(logs or {})
        self._cut = stops
        if preempted:
            self._leave()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Writes after an epoch and its validation, if it is time to."""
        logs = logs or {}
        self._model._engine.before_training = None  # if there was no step left
        if not self._cut:
            self._epoch_length = self._epoch_step
            self._epoch, self._epoch_step = epoch + 1, 0
            for name, value in logs.items():
                self._history.setdefault(name, []).append(_number(value))
        stops = self._stops()
        last = stops or epoch + 1 >= self._epochs
        if not self._cut and (self.every == "epoch" or self._due or last):
            self._write(logs)
        self._due = False
        if stops and self._any_preempted():
            self._leave()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Waits for the last checkpoint; completes a history that had nothing to train."""
        self._writer.finish()
        self._completed_history()

    def _go_on(self, folder: Path, saved: Manifest) -> bool:
        """Takes over a checkpoint; returns whether anything is left to train."""
        if self._initial_epoch > saved.epoch:
            raise ConfigurationError(
                f"Checkpoint '{folder}' has trained {saved.where()}. Received: initial_epoch="
                f"{self._initial_epoch}, which leaves out epochs. Leave initial_epoch out: "
                "`fit` goes on where the checkpoint was written."
            )
        self._restored = restored = checkpoint_reader.RestoredState(folder, saved)
        restored.restore(self._model, self._share)
        self._facts = saved.facts
        self._history = {name: list(values) for name, values in saved.history.items()}
        self._step, self._epoch, self._epoch_step = saved.step, saved.epoch, saved.epoch_step
        self._written = (saved.step, saved.epoch)
        self._ranks.note(step=self._step)
        self._initial_epoch = saved.initial_epoch
        self._remind(saved)
        for name, callback in self._callbacks.items():
            best = restored.arrays(f"best/{name}")
            early_stopping = isinstance(callback, keras.callbacks.EarlyStopping)
            if best and early_stopping and callback.restore_best_weights:
                callback.best_weights = [best[str(i)] for i in range(len(best))]
        everywhere = set().union(*self._ranks.allgather_json([*self._callbacks]))
        if gone := [name.partition("#")[0] for name in saved.callbacks if name not in everywhere]:
            self._tell(f"no {', no '.join(gone)} is among the callbacks: its state is left out")
        stopped_early = any(map(data.has_stopped, self._callbacks.values()))
        state = "was stopped early" if stopped_early else f"has trained {saved.where()}"
        if stopped_early or saved.epoch >= self._epochs:
            self._tell(
                f"nothing is trained: checkpoint '{folder}' {state} of epochs={self._epochs}. "
                "Raise epochs, or give a new run a directory of its own."
            )
            data.start_epoch(self._model, max(saved.epoch, self._epochs, 1))
            return False
        self._tell(f"goes on from checkpoint '{folder}', which {state}")
        if names := stateful_layers(self._model):
            self._tell(f"states of {', '.join(names)} are not in it, as in files of Keras")
        data.start_epoch(self._model, saved.epoch)
        position = saved.position
        if self._epoch_step or position.in_pass:
            before = position.batches - self._epoch_step
            self._adapter.start = data.EpochStart(self._epoch_step, before, position.in_pass)
        if self._adapter.cursor is not None:
            self._adapter.cursor.resume(position, restored.arrays("data"))
        return True

    def _completed_history(self) -> checkpoint_reader.RestoredState | None:
        """Puts the epochs before the checkpoint into the history of this `fit`, once."""
        restored, self._restored = self._restored, None
        if restored is not None:
            saved, history = restored.manifest, self._model.history
            history.history.update({name: list(kept) for name, kept in saved.history.items()})
            history.epoch[:] = range(saved.initial_epoch, saved.epoch)
        return restored

    def _remind(self, saved: Manifest) -> None:
        for name, callback in self._callbacks.items():
            if name in saved.callbacks:
                data.remind(callback, saved.callbacks[name])

    def _write(self, logs: Mapping[str, Any]) -> None:
        """Writes a checkpoint, unless there is one or the loss is none to go on with."""
        now = (self._step, self._epoch)  # an epoch may end after its last step was written
        if self._written == now:
            return
        loss = logs.get("loss")
        if loss is not None and not math.isfinite(float(np.mean(loss))):
            self._tell(f"writes no checkpoint: the loss is {loss} after step {self._step}")
            return
        model, engine, plan = self._model, self._model._engine, self._model._engine.plan
        epochs, adapter = self._epoch - self._initial_epoch, self._adapter
        # How far the data have been read, and what arrays it takes to come back there
        position, order = DataPosition("", 0, 0, epochs, in_pass=False), dict[str, Any]()
        if adapter.cursor is not None:
            place, order = adapter.cursor.position(
                self._epoch_step, adapter.num_batches, self._steps_per_epoch
            )
            position = DataPosition(**place, epochs=epochs)
        last = engine.logs if self._epoch_step else logs  # those of a validation may have come
        own = {**self._share.owned(), **{f"data/{name}": array for name, array in order.items()}}
        for name, callback in self._callbacks.items() if self._ranks.rank == 0 else ():
            if isinstance(callback, keras.callbacks.EarlyStopping):  # which every rank has
                best = enumerate(callback.best_weights or ())
                own |= {f"best/{name}/{i}": np.asarray(weight) for i, weight in best}
        states = {name: _json_state(name, each) for name, each in self._callbacks.items()}
        state = {
            "step": self._step, "epoch": self._epoch, "epoch_step": self._epoch_step,
            "initial_epoch": self._initial_epoch, "learning_rate": _learning_rate_of(model),
            "position": position, "facts": self._facts,
            "history": {name: list(values) for name, values in self._history.items()},
            "logs": {name: _number(value) for name, value in last.items()},
            # Of each the state on the first rank that has it.
            "callbacks": dict(ChainMap(*self._ranks.allgather_json(states))),
            "plan": plan and json.loads(plan.to_json()),
            **self._configs,
            "versions": {"keras": keras.__version__, "tensorflow": tf.__version__},
            "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        self._writer.write(own, state)
        self._written = now

    def must_stop(self) -> bool:
        """Whether this rank has reason to stop all: SIGTERM, or it could not write."""
        return self.preempted or self._writer.has_failed()

    def _stops(self) -> bool:
        """Whether training stops; a job of one rank has no `Lockstep` that asks for it."""
        alone = self._ranks.size == 1 and self.must_stop()
        return alone or bool(self._model.stop_training)

    def _any_preempted(self) -> bool:
        return any(self._ranks.allgather_json(self.preempted))

    def _leave(self) -> None:
        self._writer.finish()
        self._tell(f"ends after step {self._step}, as SIGTERM asks: start it again to go on")
        sys.exit(EXIT_CODE)

    def _tell(self, text: str) -> None:
        if self._ranks.prints:
            logger.warning("%s", text)


def _learning_rate_of(model: Any) -> float | None:
    """The learning rate that callbacks may change; `None` where a schedule sets it."""
    rate = settable_learning_rate(model)
    return None if math.isnan(rate) else rate


def _json_state(name: str, callback: Any) -> Any:
    try:
        return json.loads(json.dumps(data.state_of(callback), default=_number))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"Callback {name.partition('#')[0]}.state_dict() must return numbers, texts, lists and "
            f"dicts of them, for a checkpoint keeps it as JSON. {error}"
        ) from error


def _number(value: Any) -> Any:
    """A value of logs as Python has it."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
