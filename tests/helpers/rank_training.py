"""Cases of `training.py` on MPI ranks: what comes of them, and what each rank does for them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.data.batch import batch_shares
from tarantella_pp.runtime.stage.stage import Stage
from tests.helpers.mpi import mpi_run
from tests.helpers.training import (
    BATCH,
    CASES,
    EPOCHS,
    SAMPLES,
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


class Run(NamedTuple):
    """A case on ranks, and how they share it."""

    name: str
    stages: int
    micro_batches: int  # of a replica
    schedule: str | None = None
    replicas: int = 1
    recompute: str | None = None


def data_of_rank(case: Case) -> Case:
    """Rank 0 has the data, and sends the others their parts."""
    if world().rank == 0:
        return case
    return dataclasses.replace(case, x=None, y=None, fit=dict.fromkeys(case.fit))


def train_runs(runs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Trains on this rank; returns outcomes, stage and rows of each forward pass, and slots."""
    use_float64()
    ran: list[list[int]] = []
    forward = Stage.forward

    def counted(self: Stage, key: int, inputs: Sequence[Any], *rest: Any, **options: Any) -> Any:
        rows = next(int(tensor.shape[0]) for tensor in inputs if len(tensor.shape))
        ran.append([self.boundary.index, rows])
        return forward(self, key, inputs, *rest, **options)

    Stage.forward = counted
    found = []
    for name, stages, micro_batches, schedule, replicas, recompute in runs:
        ran.clear()
        model = make(
            CASES[name], num_stages=stages, num_micro_batches=micro_batches, schedule=schedule,
            num_replicas=replicas, recompute=recompute,
        )  # fmt: skip
        outcome = finish(model, data_of_rank(CASES[name])).plain()
        slots = [v.path for v in model.optimizer.variables if len(v.shape)]
        found.append(json.loads(json.dumps([outcome, ran, slots])))
    return found


def train_and_check(ranks: int, runs: Sequence[Run], python: str = sys.executable) -> None:
    """Trains cases in one launch: numbers of one process, each rank's work and slots its own."""
    env = {"TNT_PROGRESS": "1"}  # messages move on while ranks compute, as between hosts
    launched = mpi_run(ranks, train_runs, runs, timeout=400, env=env, python=python).check()
    for run, results in zip(runs, zip(*launched.results, strict=True), strict=True):
        outcomes, ran, slots = zip(*results, strict=True)
        assert all(outcome == outcomes[0] for outcome in outcomes), run
        check_numbers(outcomes[0], run.name, run.micro_batches * run.replicas)
        check_work(run, ran)
        # The ranks of a pipeline share the slots; each replica has all of them.
        size = ranks // run.replicas
        for first in range(0, ranks, size):
            own = [slot for part in slots[first : first + size] for slot in part]
            assert len(own) == len(set(own)) == count_of_slots(run.name), run


def check_numbers(outcome: dict[str, Any], name: str, micro_batches: int) -> None:
    """Compares what comes of a case with one process."""
    coupled = CASES[name].batch_statistics
    if coupled or name in IN_BITS:
        one_stage = piped(name, 1, micro_batches, "gpipe").plain()
        assert distance(one_stage, outcome) < BITS, name
    if not coupled:
        limit = BITS if micro_batches == 1 else ROUNDING
        assert distance(serial(name).plain(), outcome) < limit, name


def check_work(run: Run, ran: Sequence[list[list[int]]]) -> None:
    """Each rank runs its stages, and of each batch the samples of its replica."""
    size = len(ran) // run.replicas
    for rank, forwards in enumerate(ran):
        replica, position = divmod(rank, size)
        own = set(range(position, run.stages, size))
        if run.schedule == "zb-v":
            own = {position, run.stages - 1 - position}
        rows = [min(BATCH, SAMPLES - first) for first in range(0, SAMPLES, BATCH)]
        shares = [batch_shares(n, run.micro_batches, run.replicas)[replica] for n in rows]
        sizes = EPOCHS * [n for share in shares for n in share.own_sizes]
        if run.name == "dropout" and run.replicas > 1:  # one shows how much each draws
            sizes.append(shares[0].own_sizes[0])
        expected = sorted([stage, n] for stage in own for n in sizes)
        if run.name == "merged_windows":  # whose rows are windows in some stages
            forwards, expected = ([stage for stage, _ in each] for each in (forwards, expected))
        assert sorted(forwards) == expected, (run, rank)


def count_of_slots(name: str) -> int:
    """The slots that plain Keras has."""
    model = make(CASES[name])
    model.optimizer.build(model.trainable_variables)
    return sum(len(v.shape) > 0 for v in model.optimizer.variables)
