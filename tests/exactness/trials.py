"""Trains one model as a pipeline and in plain Keras, and says how far apart they end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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

EXACT = "exact"
REFUSED = "refused"
BY_MICRO_BATCH = "per micro-batch"
"""Differs with several micro-batches, as said in the docs; exact with one, and on any ranks."""
NOT_IN_KERAS = "not in Keras"
"""Plain Keras does not train it."""
DIFFERS = "differs"
CRASHED = "crashed"


def steps(model: keras.Model, case: Case) -> dict[str, Any]:
    """Trains three steps on batches of 6 and 7, tests and predicts; neither is cut evenly."""
    parts = [case.x, case.y, case.fit.get("sample_weight")]
    first, second = (
        keras.tree.map_structure(lambda part, rows=rows: part[rows], parts, none_is_leaf=False)
        for rows in (slice(0, 6), slice(6, 13))
    )
    logs = [model.train_on_batch(*batch, return_dict=True) for batch in (first, second, first)]
    logs.append(model.test_on_batch(*second, return_dict=True))
    found = {
        "logs": logs,
        "predictions": model.predict_on_batch(first[0]),
        "weights": model.get_weights(),
    }
    return {key: keras.tree.map_structure(_listed, value) for key, value in found.items()}


def _listed(value: Any) -> Any:
    return np.asarray(value).tolist()


@dataclass(frozen=True)
class Trial:
    """What is trained both ways.

    Attributes:
        name: Names it among those of its kind.
        case: The model, its data and how it is compiled.
        run: Trains a compiled model and returns what is compared.
        reuse: Whether the model may be one of an earlier trial, put back to its start: tracing the
            stages takes most of the time, and where only the loss changes they stay the same.
        limit: Largest relative difference that is taken for rounding.
    """

    name: str
    case: Case
    run: Callable[[keras.Model, Case], dict[str, Any]] = steps
    reuse: bool = False
    limit: float = ROUNDING


@dataclass(frozen=True)
class Verdict:
    """What became of a trial.

    Attributes:
        name: The trial.
        outcome: One of the constants above.
        error: Largest relative difference between the pipeline and plain Keras.
        message: Of a refusal, or of an error.
    """

    name: str
    outcome: str
    error: float = 0.0
    message: str = ""


@dataclass
class Attempt:
    """How one way of training went on this rank."""

    outcome: str
    found: dict[str, Any] | None = None
    message: str = ""


@dataclass
class Judge:
    """Judges trials on all ranks together; each rank makes the same calls.

    A rank that fails alone leaves the others waiting for its messages until they time out, and
    then the job ends with the name of the trial.
    """

    communicator: Communicator = field(default_factory=world)

    def __post_init__(self) -> None:
        self._models: dict[Any, tuple[keras.Model, list[Any]]] = {}

    def judge(self, trials: Sequence[Trial]) -> list[Verdict]:
        """Returns what became of each trial, the same on every rank."""
        mine = trials[self.communicator.rank :: self.communicator.size]
        expected = {trial.name: self._serial(trial) for trial in mine}
        return [self._verdict(trial, expected.get(trial.name)) for trial in trials]

    def _verdict(self, trial: Trial, serial: Attempt | None) -> Verdict:
        serial_outcome, message = self._shared(serial and [serial.outcome, serial.message])
        if serial_outcome != EXACT:
            return Verdict(trial.name, NOT_IN_KERAS, 0.0, message)
        attempt = self._attempt(trial, STAGES, MICRO_BATCHES)
        if attempt.outcome != EXACT:
            return Verdict(trial.name, attempt.outcome, 0.0, attempt.message)
        error = self._error(serial, attempt)
        if error >= trial.limit:
            # In an eager step some layers compute in another order, or draw other random numbers.
            serial = serial and self._serial(trial, eagerly=False)
            error = self._error(serial, attempt)
        if error < trial.limit:
            return Verdict(trial.name, EXACT, error)
        one = self._attempt(trial, STAGES, 1)
        with self._alone():
            single = self._piped(trial, 1, MICRO_BATCHES) if serial else None
        same = one.outcome == EXACT and self._error(serial, one) < trial.limit
        if self._error(single, attempt) < BITS and same:
            return Verdict(trial.name, BY_MICRO_BATCH, error)
        return Verdict(trial.name, DIFFERS, error)

    def _attempt(self, trial: Trial, stages: int, micro_batches: int) -> Attempt:
        """Trains on all ranks, which must agree on how it went."""
        attempt = self._piped(trial, stages, micro_batches)
        digest = hashlib.sha256(json.dumps(attempt.found).encode()).hexdigest()
        everywhere = self.communicator.allgather_json([attempt.outcome, attempt.message, digest])
        outcomes, _, digests = zip(*everywhere, strict=True)
        if CRASHED in outcomes or len(set(outcomes)) > 1 or len(set(digests)) > 1:
            raise AssertionError(f"Ranks crashed or differ in trial '{trial.name}': {everywhere}")
        return attempt

    def _error(self, expected: Attempt | None, attempt: Attempt) -> float:
        """How far two attempts are apart, worked out on the rank that has both."""
        return self._shared(None if expected is None else _distance(expected, attempt))

    def _shared(self, value: Any) -> Any:
        """The value of the one rank that has one."""
        return next(v for v in self.communicator.allgather_json(value) if v is not None)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Pipelines made inside are all in this process."""
        with mock.patch("tarantella_pp.models.pipeline_model.world", Communicator):
            yield

    def _serial(self, trial: Trial, eagerly: bool = True) -> Attempt:
        def make() -> keras.Model:
            keras.utils.set_random_seed(1)
            model = trial.case.build()
            model.compile(**trial.case.compiled(), run_eagerly=eagerly)
            return model

        return _tried(make, trial)

    def _piped(self, trial: Trial, stages: int, micro_batches: int) -> Attempt:
        options = {"num_stages": stages, "num_micro_batches": micro_batches}

        def make() -> keras.Model:
            model = self._fresh(trial, options) if trial.reuse else _pipeline(trial, options)
            model.compile(**trial.case.compiled())
            return model

        return _tried(make, trial)

    def _fresh(self, trial: Trial, options: Mapping[str, int]) -> keras.Model:
        key = trial.case.build, *options.values()
        if key not in self._models:
            model = _pipeline(trial, options)
            self._models[key] = model, model.get_weights()
        model, start = self._models[key]
        model.set_weights(start)
        return model


def _pipeline(trial: Trial, options: Mapping[str, int]) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = PipelineModel(trial.case.build(), **options)
    empty = [i for i, stage in enumerate(model.plan.stages) if not stage.parameter_bytes]
    if empty:
        raise AssertionError(f"'{trial.name}' leaves stages {empty} nothing to train")
    return model


def _tried(make: Callable[[], keras.Model], trial: Trial) -> Attempt:
    model = None
    try:
        model = make()
        start = _local_weights(model)
        return Attempt(EXACT, trial.run(model, trial.case))
    except CommunicationError:
        return Attempt(CRASHED, None, traceback.format_exc())
    except TarantellaError as error:
        if model is not None and distance(start, _local_weights(model), "weights"):
            return Attempt(CRASHED, None, f"refused after training began: {error}")
        return Attempt(REFUSED, None, str(error))
    except Exception:
        # At once, for other ranks may wait for this one until they give up.
        print(f"Trial '{trial.name}':\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return Attempt(CRASHED, None, traceback.format_exc())


def _local_weights(model: keras.Model) -> list[Any]:
    """What this rank has of the weights, without asking the others."""
    return [np.array(variable) for layer in model.layers for variable in layer.variables]


def _distance(expected: Attempt, attempt: Attempt) -> float:
    try:
        return distance(expected.found, attempt.found)
    except AssertionError:
        return float("inf")
