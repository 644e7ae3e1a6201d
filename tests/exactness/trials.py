"""Trains models as pipelines and in plain Keras, and says how far apart they end."""

import functools
import hashlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import keras

from tarantella_pp.errors import CommunicationError, TarantellaError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tests.exactness import expected
from tests.exactness.expected import BY_MICRO_BATCH, CRASHED, EXACT, REFUSED, Verdict
from tests.helpers.draws import more_asked_for
from tests.helpers.training import BITS, ROUNDING, Case, compiled, distance, lists_of

STAGES, MICRO_BATCHES = 2, 4
EVENLY, UNEVENLY = 8, 7
"""Samples of a batch; of one that is cut evenly stages are traced for one size only."""
MOST_TOGETHER = 16


def training(model: keras.Model, case: Case, rows: int = EVENLY) -> dict[str, Any]:
    batches = [_batch(case, first, rows) for first in (0, rows, 0)]
    logs = [model.train_on_batch(*batch, return_dict=True) for batch in batches]
    return lists_of({"logs": logs, "weights": model.get_weights()})


def steps(model: keras.Model, case: Case, rows: int = EVENLY) -> dict[str, Any]:
    logs = model.test_on_batch(*_batch(case, rows, rows), return_dict=True)
    return {"evaluated": lists_of(logs)} | training(model, case, rows)


def _batch(case: Case, first: int, rows: int) -> Any:
    parts = [case.x, case.y, case.fit.get("sample_weight")]
    return keras.tree.map_structure(lambda p: p[first : first + rows], parts, none_is_leaf=False)


@dataclass(frozen=True)
class Part:
    name: str  # among those of its kind
    value: Any  # what makes it
    family: Hashable = None  # parts of one are tried together, in one model; others alone


@dataclass(frozen=True)
class Trial:
    case: Case
    run: Callable[[keras.Model, Case], dict[str, Any]] = steps  # one micro-batch, and plain Keras
    limit: float = ROUNDING  # the largest relative difference that is taken for rounding
    eagerly: bool = True  # as plain Keras does at first: tracing takes more time
    name: str = ""
    in_parts: Callable[[keras.Model, Case], dict[str, Any]] | None = None  # several micro-batches


@dataclass
class Attempt:
    outcome: str
    found: dict[str, Any] = field(default_factory=dict)
    message: str = ""


@dataclass
class Judge:
    """Judges parts of one kind on all ranks together; each rank makes the same calls.

    A rank that fails alone leaves the others waiting for its messages until they time out, and
    then the job ends with the names of the parts.
    """

    kind: str
    make: Callable[[Sequence[Part]], Trial]
    communicator: Communicator = field(default_factory=world)
    _last: tuple[Any, ...] = ()  # what the last pipeline was made of, that, and its first weights

    def judge(self, parts: Iterable[Part]) -> list[Verdict]:
        """Returns what became of each part, the same on every rank."""
        found = []
        groups = self._groups(parts)
        for first in range(0, len(groups), self.communicator.size):
            found += self._judge_groups(groups[first : first + self.communicator.size])
        return found

    def _groups(self, parts: Iterable[Part]) -> list[list[Part]]:
        """What is tried together: families of which the same is expected."""
        groups: dict[Hashable, list[Part]] = {}
        for part in parts:
            outcome = expected.outcome(self.kind, part.name)
            joined = outcome == EXACT or (outcome == BY_MICRO_BATCH and not more_asked_for())
            alone = part.family is None or not joined
            groups.setdefault(part.name if alone else (part.family, outcome), []).append(part)
        found = []
        for group in groups.values():
            size = -(-len(group) // -(-len(group) // MOST_TOGETHER))  # all of about the same
            found += [group[i : i + size] for i in range(0, len(group), size)]
        return found

    def _judge_groups(self, groups: Sequence[list[Part]]) -> list[Verdict]:
        """Judges as many groups as there are ranks: each trains another one in plain Keras."""
        trials = [replace(self.make(g), name=" and ".join(p.name for p in g)) for g in groups]
        own = self.communicator.rank
        plain = [_plain(trial) if i == own else None for i, trial in enumerate(trials)]
        found = []
        for group, trial, attempt in zip(groups, trials, plain, strict=True):
            verdict = self._judge(trial, attempt)
            wanted = expected.outcome(self.kind, group[0].name)
            judged = [replace(verdict, name=part.name) for part in group]
            if len(group) > 1 and verdict.outcome != wanted:  # what trains alone must do so here
                print(f"Not as expected, so one by one: {verdict}", file=sys.stderr)
                alone = [v for part in group for v in self._judge_groups([[part]])]
                judged = alone if any(v.outcome != wanted for v in alone) else judged
            found += judged
        return found

    def _judge(self, trial: Trial, plain: Attempt | None) -> Verdict:
        """Judges a trial; `plain` is how plain Keras trains it, on one of the ranks."""
        outcome, message = self._shared(plain and [plain.outcome, plain.message])
        if outcome != EXACT:
            return Verdict(trial.name, expected.NOT_IN_KERAS, 0.0, message)
        attempt = self._attempt(trial, STAGES, MICRO_BATCHES)
        if attempt.outcome != EXACT:
            return Verdict(trial.name, attempt.outcome, 0.0, attempt.message)
        error = self._error(plain, attempt)
        if error >= trial.limit and trial.eagerly:
            # In an eager step some layers compute in another order, or draw other random numbers.
            trial = replace(trial, eagerly=False)
            plain = plain and _plain(trial)
            error = self._error(plain, attempt)
        if error >= trial.limit:
            outcome = self._with_other_pieces(trial, plain, attempt)
        return Verdict(trial.name, outcome, error)

    def _with_other_pieces(self, trial: Trial, plain: Attempt | None, attempt: Attempt) -> str:
        """Whether a trial differs as several micro-batches may, in the same way on all ranks."""
        one = self._error(plain, self._attempt(trial, STAGES, 1))
        # A pipeline in this process, of one stage.
        with mock.patch("tarantella_pp.models.pipeline_model.world", Communicator):
            single = plain and self._piped(trial, 1, MICRO_BATCHES)
        ranks = self._error(single, attempt)
        return BY_MICRO_BATCH if one < trial.limit and ranks < BITS else expected.DIFFERS

    def _attempt(self, trial: Trial, stages: int, micro_batches: int) -> Attempt:
        """Trains on all ranks, which must agree on how it went."""
        attempt = self._piped(trial, stages, micro_batches)
        digest = hashlib.sha256(json.dumps(attempt.found).encode()).hexdigest()
        everywhere = self.communicator.allgather_json([attempt.outcome, attempt.message, digest])
        outcomes, messages, digests = zip(*everywhere, strict=True)
        if CRASHED in outcomes or len(set(outcomes)) > 1 or len(set(digests)) > 1:
            raise AssertionError(f"Ranks crashed or differ in trial {trial.name}: {everywhere}")
        # Each rank has numbered its layers, which messages name, by what it has made itself.
        return replace(attempt, message=messages[0])

    def _piped(self, trial: Trial, stages: int, micro_batches: int) -> Attempt:
        build = functools.partial(self._pipeline, trial, stages, micro_batches)
        if micro_batches > 1 and trial.in_parts is not None:
            trial = replace(trial, run=trial.in_parts)
        return _tried(build, trial)

    def _pipeline(self, trial: Trial, stages: int, micro_batches: int) -> PipelineModel:
        """Makes a pipeline, or takes the last one of the same model, whose stages are compiled."""
        same = trial.case.build, stages, micro_batches
        if self._last and self._last[0] == same:
            _, model, start = self._last
            model.set_weights(start)
            model._engine.stages.have_run = False  # `compile` keeps stages that are as they were
            return model
        model = PipelineModel(trial.case.build(), stages, micro_batches, balance="flops")
        empty = [i for i, stage in enumerate(model.plan.stages) if not stage.parameter_bytes]
        if empty:
            raise AssertionError(f"{trial.name} leaves stages {empty} nothing to train")
        self._last = same, model, model.get_weights()
        return model

    def _error(self, wanted: Attempt | None, attempt: Attempt) -> float:
        """How far two attempts are apart, worked out on the rank that has both."""
        return self._shared(wanted and _distance(wanted.found, attempt.found))

    def _shared(self, value: Any) -> Any:
        """The value of the one rank that has one."""
        return next(v for v in self.communicator.allgather_json(value) if v is not None)


def _plain(trial: Trial) -> Attempt:
    return _tried(trial.case.build, trial, run_eagerly=trial.eagerly)


def _tried(build: Callable[[], keras.Model], trial: Trial, **options: Any) -> Attempt:
    model = None
    keras.utils.set_random_seed(1)
    try:
        model = compiled(build(), **trial.case.compiled(), **options)
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


def _distance(wanted: Any, found: Any) -> float:
    try:
        return distance({name: wanted[name] for name in found}, found)
    except AssertionError:
        return float("inf")


def classes_in(module: ModuleType, left_out: Container[str] = ()) -> dict[str, type]:
    """Returns the classes that a public module of Keras has, each under one name only."""
    found: dict[str, type] = {}
    public = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind)}
    for name, kind in sorted(public.items(), key=lambda item: item[1].__name__ != item[0]):
        if kind not in found.values():
            found[name] = kind
    return {name: found[name] for name in sorted(found) if name not in left_out}


def arguments_of(kind: type, known: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    return {
        name: known[name]()
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
