"""Trains models as pipelines and in plain Keras, and says how far apart they end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import keras
import numpy as np

from tarantella_pp.errors import CommunicationError, TarantellaError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tests.exactness.ensemble import Ensemble, plan_across
from tests.helpers.training import Case, distance

ROUNDING, BITS = 1e-10, 1e-13
STAGES, MICRO_BATCHES = 2, 4
EVENLY = 8
"""Samples of a batch that is cut evenly, so that stages are traced for one size only."""
TOGETHER = 8
"""Most trials that are made together: more save little, and if one differs all are tried again."""

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
        beside: Trials with the same value here may be made together, as one model with several
            outputs, which takes less time; `None` for one that is made alone.
        again: Whether the pipeline of the trial before may be compiled again, if it has the same
            model: nothing but its weights must change when it trains.
    """

    name: str
    case: Case
    run: Callable[[keras.Model, Case], dict[str, Any]] = steps
    limit: float = ROUNDING
    beside: Any = None
    again: bool = False


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
    found: list[Any] = field(default_factory=list)
    message: str = ""


class Group:
    """Trials that are made together."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = trials
        self._ensemble = Ensemble([trial.case for trial in trials]) if len(trials) > 1 else None
        self.case = trials[0].case if self._ensemble is None else self._ensemble.case()

    def run(self, model: keras.Model) -> list[Any]:
        """Trains a compiled model; returns what is compared for each trial."""
        found = self.trials[0].run(model, self.case)
        return [found] if self._ensemble is None else self._ensemble.split(found)

    def pipeline(self, stages: int, micro_batches: int) -> PipelineModel:
        """Makes the pipeline, whose stages have a part of each trial."""
        model = self.case.build()
        if len(self.trials) > 1 and stages > 1:
            return PipelineModel(model, plan=plan_across(model, micro_batches))
        options = {"num_stages": stages, "num_micro_batches": micro_batches}
        return PipelineModel(model, balance="flops", **options)

    def __str__(self) -> str:
        return ", ".join(repr(trial.name) for trial in self.trials)


def grouped(trials: Sequence[Trial]) -> list[Group]:
    """Puts trials together that may be, some at a time."""
    alone = [Group([trial]) for trial in trials if trial.beside is None]
    beside: dict[Any, list[Trial]] = {}
    for trial in trials:
        if trial.beside is not None:
            beside.setdefault(trial.beside, []).append(trial)
    return alone + [
        Group(found[first : first + TOGETHER])
        for found in beside.values()
        for first in range(0, len(found), TOGETHER)
    ]


@dataclass
class Judge:
    """Judges trials on all ranks together; each rank makes the same calls.

    A rank that fails alone leaves the others waiting for its messages until they time out, and
    then the job ends with the names of the trials.
    """

    communicator: Communicator = field(default_factory=world)
    _last: Any = None  # what tells the last pipeline from others, the pipeline, and its weights

    def judge(self, trials: Sequence[Trial]) -> list[Verdict]:
        """Returns what became of each trial, the same on every rank."""
        found: dict[str, Verdict] = {}
        groups, size = grouped(trials), self.communicator.size
        for first in range(0, len(groups), size):
            some = groups[first : first + size]
            # Each rank trains another one in plain Keras.
            turns = [i == self.communicator.rank for i in range(len(some))]
            plain = [
                _plain(group, _eagerly(group)) if mine else None
                for group, mine in zip(some, turns, strict=True)
            ]
            for group, serial in zip(some, plain, strict=True):
                found |= {verdict.name: verdict for verdict in self._judge(group, serial)}
            keras.backend.clear_session()
            gc.collect()
        return [found[trial.name] for trial in trials]

    def _judge(self, group: Group, plain: Attempt | None) -> list[Verdict]:
        """Judges a group; `plain` is how plain Keras trains it, on one of the ranks."""
        outcome, message = self._shared(plain and [plain.outcome, plain.message])
        if outcome != EXACT:
            return self._without_numbers(group, NOT_IN_KERAS, message)
        attempt = self._attempt(group, STAGES, MICRO_BATCHES)
        if attempt.outcome != EXACT:
            return self._without_numbers(group, attempt.outcome, attempt.message)
        errors = self._errors(plain, attempt)
        if _wrong(group, errors) and _eagerly(group):
            # In an eager step some layers compute in another order, or draw other random numbers.
            plain = plain and _plain(group, eagerly=False)
            errors = self._errors(plain, attempt)
        wrong = _wrong(group, errors)
        outcomes = self._with_other_pieces(group, plain, attempt) if wrong else []
        verdicts = []
        for i, (trial, error) in enumerate(zip(group.trials, errors, strict=True)):
            if trial not in wrong:
                verdicts.append(Verdict(trial.name, EXACT, error))
            elif outcomes[i] == DIFFERS and len(group.trials) > 1:
                verdicts += self._alone(trial)
            else:
                verdicts.append(Verdict(trial.name, outcomes[i], error))
        return verdicts

    def _without_numbers(self, group: Group, outcome: str, message: str) -> list[Verdict]:
        if len(group.trials) > 1:
            return [verdict for trial in group.trials for verdict in self._alone(trial)]
        return [Verdict(group.trials[0].name, outcome, 0.0, message)]

    def _alone(self, trial: Trial) -> list[Verdict]:
        group = Group([trial])
        plain = _plain(group, _eagerly(group)) if self.communicator.rank == 0 else None
        return self._judge(group, plain)

    def _with_other_pieces(
        self, group: Group, plain: Attempt | None, attempt: Attempt
    ) -> list[str]:
        """Whether trials differ as several micro-batches may, in the same way on all ranks."""
        one = self._errors(plain, self._attempt(group, STAGES, 1))
        with self._in_one_process():
            single = plain and self._piped(group, 1, MICRO_BATCHES)
        ranks = self._errors(single, attempt)
        limits = [trial.limit for trial in group.trials]
        return [
            BY_MICRO_BATCH if of_one < limit and of_ranks < BITS else DIFFERS
            for of_one, of_ranks, limit in zip(one, ranks, limits, strict=True)
        ]

    def _attempt(self, group: Group, stages: int, micro_batches: int) -> Attempt:
        """Trains on all ranks, which must agree on how it went."""
        attempt = self._piped(group, stages, micro_batches)
        digest = hashlib.sha256(json.dumps(attempt.found).encode()).hexdigest()
        everywhere = self.communicator.allgather_json([attempt.outcome, attempt.message, digest])
        outcomes, messages, digests = zip(*everywhere, strict=True)
        if CRASHED in outcomes or len(set(outcomes)) > 1 or len(set(digests)) > 1:
            raise AssertionError(f"Ranks crashed or differ in trials {group}: {everywhere}")
        # Each rank has numbered its layers, which messages name, by what it has made itself.
        return dataclasses.replace(attempt, message=messages[0])

    def _piped(self, group: Group, stages: int, micro_batches: int) -> Attempt:
        """Trains a pipeline on this rank."""

        def make() -> keras.Model:
            keras.utils.set_random_seed(1)
            model = self._pipeline(group, stages, micro_batches)
            model.compile(**group.case.compiled())
            return model

        return _tried(make, group)

    def _pipeline(self, group: Group, stages: int, micro_batches: int) -> PipelineModel:
        again, same = group.trials[0].again, (group.case.build, stages, micro_batches)
        if again and self._last and self._last[0] == same:
            _, model, start = self._last
            model.set_weights(start)
            return model
        model = group.pipeline(stages, micro_batches)
        empty = [i for i, stage in enumerate(model.plan.stages) if not stage.parameter_bytes]
        if empty:
            raise AssertionError(f"{group} leaves stages {empty} nothing to train")
        if again:
            self._last = same, model, model.get_weights()
        return model

    def _errors(self, expected: Attempt | None, attempt: Attempt) -> list[float]:
        """How far two attempts are apart, worked out on the rank that has both."""
        pairs = expected and zip(expected.found, attempt.found, strict=True)
        return self._shared(pairs and [_distance(a, b) for a, b in pairs])

    def _shared(self, value: Any) -> Any:
        """The value of the one rank that has one."""
        return next(v for v in self.communicator.allgather_json(value) if v is not None)

    @contextlib.contextmanager
    def _in_one_process(self) -> Iterator[None]:
        """Pipelines made inside are all in this process."""
        with mock.patch("tarantella_pp.models.pipeline_model.world", Communicator):
            yield


def _wrong(group: Group, errors: Sequence[float]) -> list[Trial]:
    return [t for t, error in zip(group.trials, errors, strict=True) if error >= t.limit]


def _eagerly(group: Group) -> bool:
    """Whether plain Keras may train in eager steps first, which takes less time than tracing."""
    return group.trials[0].beside != BY_MICRO_BATCH


def _plain(group: Group, eagerly: bool) -> Attempt:
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = group.case.build()
        model.compile(**group.case.compiled(), run_eagerly=eagerly)
        return model

    return _tried(make, group)


def _tried(make: Callable[[], keras.Model], group: Group) -> Attempt:
    model = None
    try:
        model = make()
        start = model.get_weights()
        return Attempt(EXACT, group.run(model))
    except CommunicationError:
        return Attempt(CRASHED, message=traceback.format_exc())
    except TarantellaError as error:
        if model is not None and distance(start, model.get_weights(), "weights"):
            return Attempt(CRASHED, message=f"refused after training began: {error}")
        return Attempt(REFUSED, message=str(error))
    except Exception:
        # At once, for other ranks may wait for this one until they give up.
        print(f"Trials {group}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return Attempt(CRASHED, message=traceback.format_exc())


def _distance(expected: Any, found: Any) -> float:
    try:
        return distance(expected, found)
    except AssertionError:
        return float("inf")
