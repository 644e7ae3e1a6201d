"""Cases of `training.py` on MPI ranks: what comes of them, and what each rank does for them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.stage.stage import Stage
from tests.helpers.mpi import MpiRun
from tests.helpers.training import (
    CASES,
    FIELDS,
    Case,
    distance,
    finish,
    make,
    piped,
    serial,
    use_float64,
)

ROUNDING, BITS = 1e-10, 1e-13
IN_BITS = ("tied_head", "two_in_two_out")
"""Cases that are compared with one stage, too, besides those that Keras trains otherwise."""


@dataclass
class Facts:
    """What a rank had to do for a case."""

    ran: list[list[int]]  # stage and number of samples of each forward pass
    slots: list[str]
    replicas: int


def data_of_rank(case: Case) -> Case:
    """Rank 0 has the data, and sends the others their parts."""
    if world().rank == 0:
        return case
    return dataclasses.replace(case, x=None, y=None, fit=dict.fromkeys(case.fit))


def train_cases(cases: Sequence[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
    """Trains on this rank."""
    use_float64()
    ran: list[list[int]] = []
    forward = Stage.forward

    def counted(self: Stage, key: int, inputs: Sequence[Any], *rest: Any, **options: Any) -> Any:
        rows = next(int(tensor.shape[0]) for tensor in inputs if len(tensor.shape))
        ran.append([self.boundary.index, rows])
        return forward(self, key, inputs, *rest, **options)

    Stage.forward = counted
    found = []
    for name, options in cases:
        ran.clear()
        model = make(CASES[name], **options)
        outcome = finish(model, data_of_rank(CASES[name])).plain()
        slots = [v.path for v in model.optimizer.variables if len(v.shape)]
        facts = Facts(list(ran), slots, model.plan.num_replicas)
        found.append(json.loads(json.dumps([outcome, dataclasses.asdict(facts)])))
    return found


def facts_of(run: MpiRun, case: int) -> list[Facts]:
    """What each rank did for a case of `train_cases`."""
    return [Facts(**result[case][1]) for result in run.results]


def check_numbers(run: MpiRun, case: int, name: str, micro_batches: int) -> None:
    """Compares what each rank has of a case of `train_cases` with one process."""
    outcomes = [result[case][0] for result in run.results]
    assert all(outcome == outcomes[0] for outcome in outcomes), name
    assert set(outcomes[0]) == set(FIELDS)
    coupled = CASES[name].batch_statistics
    if coupled or name in IN_BITS:
        one_stage = piped(name, 1, micro_batches, "gpipe").plain()
        assert distance(one_stage, outcomes[0]) < BITS, name
    if not coupled:
        limit = BITS if micro_batches == 1 else ROUNDING
        assert distance(serial(name).plain(), outcomes[0]) < limit, name
