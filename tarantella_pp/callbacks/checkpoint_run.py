"""One `fit` with checkpoints: what it goes on from, when it writes, and what it writes."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tarantella_pp.callbacks.checkpoint import Checkpoint
from tarantella_pp.callbacks.lockstep import EXIT_CODE, Preemption
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.files.checkpoint_reader import RestoredState, newest_whole
from tarantella_pp.files.checkpoint_writer import CheckpointWriter
from tarantella_pp.files.manifest import (
    FORMAT,
    DataPosition,
    Manifest,
    SavedFile,
    SavedTensor,
    from_plain,
    plain,
)
from tarantella_pp.files.run_facts import (
    as_json,
    configs_of,
    facts_of,
    has_plan,
    learning_rate_of,
    now,
    refuse_others,
    versions,
)
from tarantella_pp.internals.data import (
    EpochStart,
    has_stopped,
    remembered_by,
    start_epoch,
    starting_anywhere,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitOptions:
    """What `fit` was called with."""

    initial_epoch: int  # number of the first epoch
    epochs: int  # number of the last one
    steps_per_epoch: int | None  # steps per epoch, if given
    shuffle: bool  # whether it shuffles


def checkpointed(
    checkpoint: Checkpoint | None,
    model: Any,
    adapter: Any,
    options: FitOptions,
    callbacks: Any,
    preemption: Preemption | None,
) -> contextlib.AbstractContextManager[None]:
    """Surrounds Keras' own `fit`, so that a `Checkpoint` among its callbacks can work."""
    if checkpoint is None or preemption is None:
        return contextlib.nullcontext()
    listed = getattr(callbacks, "callbacks", callbacks)
    return CheckpointRun(checkpoint, model, adapter, options, listed, preemption).attached()


# When it writes (W), with `every=2` and epochs of three steps:
#
#   step 1   2   3 | validation | 4   5   6 | validation
#            W                    W      due             W
#
# A checkpoint that is due at the last step of an epoch waits for the epoch's end: the epoch is
# counted there, and what callbacks do with its logs belongs into the checkpoint.
class CheckpointRun:
    """One `fit` with checkpoints."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Any,
        adapter: Any,
        options: FitOptions,
        callbacks: Sequence[Any],
        preemption: Preemption,
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._adapter = adapter
        self._options = options
        self._callbacks = [c for c in callbacks if remembered_by(c) is not None]
        self._stateful = _stateful(callbacks)
        self._preemption = preemption
        engine = model._engine
        self._ranks = engine.communicator
        self._writer = CheckpointWriter(
            self._ranks, checkpoint.directory, checkpoint.keep, sorted(engine.stages)
        )
        self._share = model._state_share()
        self._facts: dict[str, Any] = {}
        self._configs: dict[str, Any] = {}
        self._history: dict[str, list[Any]] = {}
        self._damaged: list[str] = []
        self._restored: RestoredState | None = None
        self._step = self._epoch_step = 0
        self._epoch = options.initial_epoch
        self._initial_epoch = options.initial_epoch
        self._epoch_length: int | None = None
        self._written = -1
        self._due = self._cut = False
        self._trains = True

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Surrounds Keras' own `fit`."""
        if self._adapter.cursor is not None:
            self._adapter.cursor.keep_position()
        self._checkpoint.runs(self)
        try:
            with self._preemption.noted(), starting_anywhere(self._model):
                yield
        finally:
            self._checkpoint.runs(None)
            self._adapter.start = None
            self._model._engine.before_training = None

    def begin(self) -> None:
        """Goes on from the newest checkpoint, or begins; takes all ranks."""
        options = [str(self._checkpoint.directory), self._checkpoint.every, self._checkpoint.keep]
        given = self._ranks.allgather_json(options)
        if any(theirs != given[0] for theirs in given):
            raise ConfigurationError(
                "All ranks must have the same Checkpoint. Received: directory, every and keep "
                f"{'; '.join(f'{theirs} on rank {rank}' for rank, theirs in enumerate(given))}"
            )
        self._configs = configs_of(self._model)
        facts = facts_of(self._model, self._configs, self._data_facts())
        self._facts = self._ranks.broadcast_json(facts)
        found = newest_whole(self._ranks, self._checkpoint.directory)
        if found is not None:
            folder, manifest, self._damaged = found
            rate = learning_rate_of(self._model)
            refuse_others(manifest, self._facts, rate, str(folder))
            self._check_epochs(manifest, str(folder))
            self._go_on(RestoredState(folder, manifest), str(folder))
        if self._trains:
            self._writer.prepare()

    def begin_epoch(self) -> None:
        """Undoes what the beginning of an epoch has changed that had begun before."""
        restored, self._restored = self._restored, None
        if restored is None:
            return
        restored.complete_history(self._model)
        if self._epoch_step:
            restored.restore_learning_rate(self._model)
            restored.restore_logs(self._model)
            restored.restore_metrics_later(self._model, self._share)
            self._load_callback_states(restored.manifest)  # on_epoch_begin may have reset them

    def end_batch(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Writes after a step, if it is time to."""
        before, self._step = self._step, self._step + batch + 1 - self._epoch_step
        self._epoch_step = batch + 1
        every = self._checkpoint.every
        due = every != "epoch" and self._step // int(every) > before // int(every)
        length = self._epoch_length or self._checkpoint.params.get("steps")
        if length is not None and batch + 1 >= length:  # the end of the epoch follows
            self._due = due
            return
        # `Lockstep` has all ranks stop after the same step, so that all of them come to ask why.
        stops = bool(self._model.stop_training) or self._preempted_alone()
        preempted = stops and self._any_preempted()
        if due or stops:
            self._write(logs)
        self._cut = stops
        if preempted:
            self._leave()

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Writes after an epoch and its validation, if it is time to."""
        self._model._engine.before_training = None  # if there was no step left
        if not self._cut:
            self._epoch_length = self._epoch_step
            self._epoch, self._epoch_step = epoch + 1, 0
            for name, value in logs.items():
                self._history.setdefault(name, []).append(plain(_number(value)))
        stops = bool(self._model.stop_training) or self._preempted_alone()
        last = stops or epoch + 1 >= self._options.epochs
        if not self._cut and (self._checkpoint.every == "epoch" or self._due or last):
            self._write(logs)
        self._due = False
        if stops and self._any_preempted():
            self._leave()

    def end(self) -> None:
        """Completes the history of a `fit` that had nothing to train."""
        restored, self._restored = self._restored, None
        if restored is not None:
            restored.complete_history(self._model)

    def _data_facts(self) -> dict[str, Any]:
        """What is known of the data on the rank that reads them."""
        adapter, options = self._adapter, self._options
        facts = {"contents": adapter.description, "batches": adapter.num_batches}
        facts |= {"steps_per_epoch": options.steps_per_epoch, "shuffle": options.shuffle}
        return facts | ({} if adapter.cursor is None else adapter.cursor.facts())

    def _check_epochs(self, saved: Manifest, where: str) -> None:
        """Refuses a checkpoint from before the first epoch."""
        if self._options.initial_epoch > saved.epoch:
            raise ConfigurationError(
                f"Checkpoint '{where}' has trained {saved.where()}. Received: initial_epoch="
                f"{self._options.initial_epoch}, which leaves out epochs. Leave initial_epoch out: "
                "`fit` goes on where the checkpoint was written."
            )

    def _go_on(self, restored: RestoredState, where: str) -> None:
        """Takes over a checkpoint."""
        saved = restored.manifest
        restored.restore(self._model, self._share)
        restored.remind(self._callbacks)
        self._facts = {**self._facts, **saved.facts}  # one made of a file knows of no data
        self._history = {name: list(values) for name, values in saved.history.items()}
        self._step = self._written = saved.step
        self._epoch, self._epoch_step = saved.epoch, saved.epoch_step
        self._initial_epoch = saved.initial_epoch
        self._restored = restored
        if any(map(has_stopped, self._callbacks)):
            self._trains = False
            state, epoch = "was stopped early", max(self._options.epochs, 1)
        else:
            self._trains = saved.epoch < self._options.epochs
            state, epoch = f"has trained {saved.where()}", saved.epoch
        self._restore_callbacks(saved)
        if not self._trains:
            self._tell(
                f"nothing is trained: checkpoint '{where}' {state} of epochs="
                f"{self._options.epochs}. Raise epochs, or give a new run a directory of its own."
            )
            start_epoch(self._model, epoch)
            return
        self._tell(f"goes on from checkpoint '{where}', which {state}")
        start_epoch(self._model, epoch)
        self._resume_data(restored)
        if has_plan(saved, self._model.plan):
            self._model._engine.stages.begin_with(saved.shapes)

    def _restore_callbacks(self, saved: Manifest) -> None:
        """Gives callbacks back their states; names the callbacks that are gone."""
        self._load_callback_states(saved)
        everywhere = set().union(*self._ranks.allgather_json([*self._stateful]))
        gone = [name.partition("#")[0] for name in saved.callback_states if name not in everywhere]
        if gone:
            self._tell(f"no {', no '.join(gone)} is among the callbacks: its state is left out")

    def _load_callback_states(self, saved: Manifest) -> None:
        for name, callback in self._stateful.items():
            if name in saved.callback_states:
                callback.load_state_dict(from_plain(saved.callback_states[name]))

    def _merged(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What all ranks know together; the first that knows a thing counts."""
        merged: dict[str, Any] = {}
        for theirs in reversed(self._ranks.allgather_json(mine)):
            merged |= theirs
        return merged

    def _resume_data(self, restored: RestoredState) -> None:
        """Brings the data to where they were."""
        position = restored.manifest.position
        steps = self._epoch_step
        if steps or position.in_pass:
            before = position.batches - steps
            self._adapter.start = EpochStart(steps, before, position.in_pass)
        if self._adapter.cursor is not None:
            self._adapter.cursor.resume(position, restored.arrays("data"))

    def _write(self, logs: Mapping[str, Any]) -> None:
        """Writes a checkpoint, unless this step has one or its loss is none to go on with."""
        if self._written == self._step:
            return
        loss = logs.get("loss")
        if loss is not None and not math.isfinite(float(np.mean(loss))):
            self._tell(f"writes no checkpoint: the loss is {loss} after step {self._step}")
            return
        position, arrays = self._position()
        own = {**self._share.owned(), **arrays}
        if self._ranks.rank == 0:
            own |= self._best_weights()
        describe = functools.partial(
            self._manifest,
            position=position,
            shapes=self._merged(self._model._engine.stages.first_shapes()),
            callback_states=self._merged(
                {name: _json_state(name, each) for name, each in self._stateful.items()}
            ),
        )
        self._writer.write(self._step, own, describe, self._damaged)
        self._written = self._step

    def _position(self) -> tuple[DataPosition, dict[str, Any]]:
        """How far the data have been read, and what arrays it takes to come back there."""
        place: dict[str, Any] = {"kind": "", "passes": 0, "batches": 0, "in_pass": False}
        arrays: dict[str, Any] = {}
        if self._adapter.cursor is not None:
            place, arrays = self._adapter.cursor.position(
                self._in_pass(), self._adapter.num_batches, self._options.steps_per_epoch
            )
        position = DataPosition(**place, epochs=self._epoch - self._initial_epoch)
        return position, {f"data/{name}": array for name, array in arrays.items()}

    def _in_pass(self) -> bool:
        """Whether the next batch is one of the pass over the data that was read last."""
        steps = self._options.steps_per_epoch
        if steps is None:
            return self._epoch_step > 0
        length, cursor = self._adapter.num_batches, self._adapter.cursor
        return length is None or cursor is None or cursor.batches < length

    def _manifest(
        self, files: tuple[SavedFile, ...], tensors: dict[str, SavedTensor], **gathered: Any
    ) -> Manifest:
        engine = self._model._engine
        remembered = [(type(c).__name__, remembered_by(c) or {}) for c in self._callbacks]
        return Manifest(
            format=FORMAT,
            step=self._step,
            epoch=self._epoch,
            epoch_step=self._epoch_step,
            initial_epoch=self._initial_epoch,
            learning_rate=learning_rate_of(self._model),
            tensors=tensors,
            files=files,
            facts=self._facts,
            history=self._history,
            logs={name: plain(_number(value)) for name, value in engine.logs.items()},
            callbacks=as_json(remembered),
            plan=json.loads(self._model.plan.to_json()),
            **self._configs,
            versions=versions(),
            written=now(),
            **gathered,
        )

    def _best_weights(self) -> dict[str, Any]:
        """What an `EarlyStopping` would restore in the end, which every rank has."""
        return {
            f"best/{number}/{i}": np.asarray(weight)
            for number, callback in enumerate(self._callbacks)
            for i, weight in enumerate(getattr(callback, "best_weights", None) or ())
        }

    def _preempted_alone(self) -> bool:
        """Says whether a job of one rank was asked to end; several ranks stop together first."""
        return self._ranks.size == 1 and self._preemption.asked

    def _any_preempted(self) -> bool:
        return any(self._ranks.allgather_json(self._preemption.asked))

    def _leave(self) -> None:
        """Ends this rank, as all others do."""
        self._tell(f"ends after step {self._step}, as SIGTERM asks: start it again to go on")
        sys.exit(EXIT_CODE)

    def _tell(self, text: str) -> None:
        if self._model._engine.prints:
            logger.warning("%s", text)


def _stateful(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Callbacks with `state_dict` and `load_state_dict`, by class and number within the class."""
    counts: Counter[str] = Counter()
    found = {}
    for callback in callbacks:
        kind = type(callback).__name__
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            found[f"{kind}#{counts[kind]}"] = callback
            counts[kind] += 1
    return found


def _json_state(name: str, callback: Any) -> Any:
    try:
        return json.loads(json.dumps(plain(callback.state_dict()), default=_number))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"Callback {name.partition('#')[0]}.state_dict() must return numbers, texts, lists and "
            f"dicts of them, for a checkpoint keeps it as JSON. {error}"
        ) from error


def _number(value: Any) -> Any:
    """A value of logs as Python has it."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else from_plain(value)
