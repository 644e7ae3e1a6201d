"""Trains models as pipelines and in plain Keras, and says how far apart they end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import keras
import numpy as np

from tarantella_pp.errors import CommunicationError, TarantellaError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tests.helpers.training import Case, distance

ROUNDING, BITS = 1e-10, 1e-13
STAGES, MICRO_BATCHES = 2, 4
EVENLY = 8
"""Samples of a batch that is cut evenly, so that stages are traced for one size only."""

EXACT = "exact"
REFUSED = "refused"
BY_MICRO_BATCH = "per micro-batch"
"""Differs with several micro-batches, as said in the docs; exact with one, and on any ranks."""
NOT_IN_KERAS = "not in Keras"
"""Plain Keras does not train it."""
DIFFERS = "differs"
CRASHED = "crashed"


def training(model: keras.Model, case: Case, rows: int = 7) -> dict[str, Any]:
    """Trains three steps, by default on batches that are not cut evenly."""
    batches = [_batch(case, first, rows) for first in (0, rows, 0)]
    logs = [model.train_on_batch(*batch, return_dict=True) for batch in batches]
    return _listed({"logs": logs, "weights": model.get_weights()})


def predicting(model: keras.Model, case: Case, rows: int = 7) -> dict[str, Any]:
    """Trains and predicts."""
    found = training(model, case, rows)
    return {**found, "predictions": _listed(model.predict_on_batch(_batch(case, 0, rows)[0]))}


def steps(model: keras.Model, case: Case, rows: int = 7) -> dict[str, Any]:
    """Trains, predicts and tests."""
    found = predicting(model, case, rows)
    found["logs"].append(_listed(model.test_on_batch(*_batch(case, rows, rows), return_dict=True)))
    return found


def _batch(case: Case, first: int, rows: int) -> Any:
    parts = [case.x, case.y, case.fit.get("sample_weight")]
    return keras.tree.map_structure(lambda p: p[first : first + rows], parts, none_is_leaf=False)


def _listed(values: Any) -> Any:
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), values)


@dataclass(frozen=True)
class Trial:
    """What is trained both ways.

    Attributes:
        name: Names it among those of its kind.
        case: The model, its data and how it is compiled.
        run: Trains a compiled model and returns what is compared.
        limit: Largest relative difference that is taken for rounding.
        again: Whether a pipeline of the same model may be compiled again: nothing but its weights
            must change when it trains.
        family: Trials of one family can be tried together.
        join: Makes one trial of several of a family.
        parts: The trials that this one has been made of. They are exact if it is.
    """

    name: str
    case: Case
    run: Callable[[keras.Model, Case], dict[str, Any]] = steps
    limit: float = ROUNDING
    again: bool = False
    family: Hashable = None
    join: Callable[[Sequence[Trial]], Trial] | None = None
    parts: Sequence[Trial] = ()


def together(trials: Sequence[Trial], most: int = 8) -> list[Trial]:
    """Joins trials of one family, some at a time."""
    families: dict[Hashable, list[Trial]] = {}
    for trial in trials:
        families.setdefault(trial.name if trial.family is None else trial.family, []).append(trial)
    found = []
    for family in families.values():
        for first in range(0, len(family), most):
            some = family[first : first + most]
            joined = len(some) > 1 and some[0].join is not None
            if joined:
                found.append(dataclasses.replace(some[0].join(some), parts=some))
            else:
                found += some
    return found


def models_together(trials: Sequence[Trial]) -> Trial:
    """Adds up the outputs of models that have the same targets."""

    def build() -> keras.Model:
        models = [trial.case.build() for trial in trials]
        inputs = [x for model in models for x in model.inputs]
        return keras.Model(inputs, keras.layers.Add()([model.output for model in models]))

    data = [x for trial in trials for x in trial.case.x]
    case = dataclasses.replace(trials[0].case, build=build, x=data)
    name = " and ".join(trial.name for trial in trials)
    return dataclasses.replace(trials[0], name=name, case=case)


@dataclass(frozen=True)
class Verdict:
    """What became of a trial."""

    name: str
    outcome: str
    error: float = 0.0
    message: str = ""


@dataclass
class Attempt:
    """How one way of training went on this rank."""

    outcome: str
    found: dict[str, Any] = field(default_factory=dict)
    message: str = ""


@dataclass
class Judge:
    """Judges trials on all ranks together; each rank makes the same calls.

    A rank that fails alone leaves the others waiting for its messages until they time out, and
    then the job ends with the names of the trials.
    """

    communicator: Communicator = field(default_factory=world)
    _made: dict[Any, Any] = field(default_factory=dict)  # pipelines to use again, their weights

    def judge(self, trials: Sequence[Trial]) -> list[Verdict]:
        """Returns what became of each trial, the same on every rank."""
        found: list[Verdict] = []
        ranks = self.communicator
        for first in range(0, len(trials), ranks.size):
            some = trials[first : first + ranks.size]
            # Each rank trains another one in plain Keras.
            plain = [_plain(t, True) if i == ranks.rank else None for i, t in enumerate(some)]
            for trial, own in zip(some, plain, strict=True):
                verdict = self._judge(trial, own)
                if not trial.parts:
                    found.append(verdict)
                elif verdict.outcome == EXACT:
                    found += [dataclasses.replace(verdict, name=t.name) for t in trial.parts]
                else:
                    print(f"Not {EXACT} together, so one by one: {verdict}", file=sys.stderr)
                    found += self.judge(trial.parts)
            keras.backend.clear_session()
            gc.collect()
        return found

    def _judge(self, trial: Trial, plain: Attempt | None) -> Verdict:
        """Judges a trial; `plain` is how plain Keras trains it, on one of the ranks."""
        outcome, message = self._shared(plain and [plain.outcome, plain.message])
        if outcome != EXACT:
            return Verdict(trial.name, NOT_IN_KERAS, 0.0, message)
        attempt = self._attempt(trial, STAGES, MICRO_BATCHES)
        if attempt.outcome != EXACT:
            return Verdict(trial.name, attempt.outcome, 0.0, attempt.message)
        error = self._error(plain, attempt)
        if error >= trial.limit:
            # In an eager step some layers compute in another order, or draw other random numbers.
            plain = plain and _plain(trial, eagerly=False)
            error = self._error(plain, attempt)
        if error >= trial.limit:
            outcome = self._with_other_pieces(trial, plain, attempt)
        return Verdict(trial.name, outcome, error)

    def _with_other_pieces(self, trial: Trial, plain: Attempt | None, attempt: Attempt) -> str:
        """Whether a trial differs as several micro-batches may, in the same way on all ranks."""
        one = self._error(plain, self._attempt(trial, STAGES, 1))
        with self._in_one_process():
            single = plain and self._piped(trial, 1, MICRO_BATCHES)
        ranks = self._error(single, attempt)
        return BY_MICRO_BATCH if one < trial.limit and ranks < BITS else DIFFERS

    def _attempt(self, trial: Trial, stages: int, micro_batches: int) -> Attempt:
        """Trains on all ranks, which must agree on how it went."""
        attempt = self._piped(trial, stages, micro_batches)
        digest = hashlib.sha256(json.dumps(attempt.found).encode()).hexdigest()
        everywhere = self.communicator.allgather_json([attempt.outcome, attempt.message, digest])
        outcomes, messages, digests = zip(*everywhere, strict=True)
        if CRASHED in outcomes or len(set(outcomes)) > 1 or len(set(digests)) > 1:
            raise AssertionError(f"Ranks crashed or differ in trial {trial.name}: {everywhere}")
        # Each rank has numbered its layers, which messages name, by what it has made itself.
        return dataclasses.replace(attempt, message=messages[0])

    def _piped(self, trial: Trial, stages: int, micro_batches: int) -> Attempt:
        """Trains a pipeline on this rank."""

        def make() -> keras.Model:
            keras.utils.set_random_seed(1)
            model = self._pipeline(trial, stages, micro_batches)
            model.compile(**trial.case.compiled())
            return model

        return _tried(make, trial)

    def _pipeline(self, trial: Trial, stages: int, micro_batches: int) -> PipelineModel:
        same = trial.case.build, stages, micro_batches
        if trial.again and same in self._made:
            model, start = self._made[same]
            model.set_weights(start)
            return model
        model = PipelineModel(trial.case.build(), stages, micro_batches, balance="flops")
        empty = [i for i, stage in enumerate(model.plan.stages) if not stage.parameter_bytes]
        if empty:
            raise AssertionError(f"{trial.name} leaves stages {empty} nothing to train")
        if trial.again:
            self._made[same] = model, model.get_weights()
        return model

    def _error(self, expected: Attempt | None, attempt: Attempt) -> float:
        """How far two attempts are apart, worked out on the rank that has both."""
        return self._shared(expected and _distance(expected.found, attempt.found))

    def _shared(self, value: Any) -> Any:
        """The value of the one rank that has one."""
        return next(v for v in self.communicator.allgather_json(value) if v is not None)

    @contextlib.contextmanager
    def _in_one_process(self) -> Iterator[None]:
        """Pipelines made inside are all in this process."""
        with mock.patch("tarantella_pp.models.pipeline_model.world", Communicator):
            yield


def _plain(trial: Trial, eagerly: bool) -> Attempt:
    """Trains in plain Keras, in eager steps where that is enough: tracing takes more time."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = trial.case.build()
        model.compile(**trial.case.compiled(), run_eagerly=eagerly)
        return model

    return _tried(make, trial)


def _tried(make: Callable[[], keras.Model], trial: Trial) -> Attempt:
    model = None
    try:
        model = make()
        start = model.get_weights()
        return Attempt(EXACT, trial.run(model, trial.case))
    except CommunicationError:
        return Attempt(CRASHED, message=traceback.format_exc())
    except TarantellaError as error:
        if model is not None and distance(start, model.get_weights(), "weights"):
            return Attempt(CRASHED, message=f"refused after training began: {error}")
        return Attempt(REFUSED, message=str(error))
    except Exception:
        # At once, for other ranks may wait for this one until they give up.
        print(f"Trial {trial.name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return Attempt(CRASHED, message=traceback.format_exc())


def _distance(expected: Any, found: Any) -> float:
    try:
        return distance(expected, found)
    except AssertionError:
        return float("inf")
