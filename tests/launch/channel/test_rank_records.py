"""Records of ranks, and what is concluded from them."""

from __future__ import annotations

import time

from tarantella_pp.launch.channel import rank_records
from tarantella_pp.launch.channel.rank_records import (
    FAILED,
    RETURNED,
    STARTED,
    Record,
)

NOW = time.monotonic()


def record(rank: int, state: str, age: float = 10.0, **changes) -> Record:
    return Record(rank, state, pid=1, host="h", time=NOW - age, order=int(1000 - age), **changes)


def by_rank(*found: Record) -> dict[int, Record]:
    return {one.rank: one for one in found}


def test_the_first_failure_is_the_oldest() -> None:
    found = by_rank(record(0, FAILED, 3), record(1, FAILED, 5), record(2, RETURNED, 9))
    assert rank_records.first_failure(found) == found[1]
    assert rank_records.first_failure(by_rank(record(0, RETURNED), record(1, STARTED))) is None


def test_a_consequence_does_not_hide_its_cause() -> None:
    found = by_rank(record(0, FAILED, 5, culprit=1), record(1, FAILED, 3))
    assert rank_records.first_failure(found) == found[1]


def test_a_rank_that_mpi_may_have_ended_does_not_hide_one_that_was_killed() -> None:
    found = by_rank(record(0, FAILED, 5, unexplained=True), record(1, FAILED, 3))
    assert rank_records.first_failure(found) == found[1]
    alone = by_rank(record(0, FAILED, 5, unexplained=True), record(1, STARTED))
    assert rank_records.first_failure(alone) == alone[0]


def test_of_two_unexplained_ends_the_earlier_one_counts_whichever_was_heard_of_first() -> None:
    found = by_rank(
        record(0, FAILED, 5, unexplained=True, ended_at=10.02),
        record(1, FAILED, 3, unexplained=True, ended_at=10.01),
    )
    assert rank_records.first_failure(found) == found[1]


def test_the_rank_that_ended_too_early_is_the_failure() -> None:
    waiting = record(0, FAILED, 1, culprit=1, details="where")
    failure = rank_records.first_failure(
        by_rank(waiting, record(1, RETURNED, 9, cause="sys.exit(0)"))
    )
    assert failure is not None
    assert (failure.rank, failure.state, failure.exit_code) == (1, FAILED, 1)
    assert failure.cause == "sys.exit(0) while rank 0 waits for it"
    assert failure.details == "where"


def test_a_job_is_stuck_only_when_nobody_works() -> None:
    ended, waiting = record(1, RETURNED), record(0, STARTED, waiting_at="t.py:1 c.recv")
    stuck = rank_records.find_deadlock(by_rank(ended, waiting), 2, patience=1)
    assert stuck is not None
    assert stuck.rank == 1
    assert "its script ended while other ranks wait for it (rank 0 at t.py:1 c.recv)" in stuck.cause
    works, other = record(2, STARTED), record(2, RETURNED)
    assert rank_records.find_deadlock(by_rank(ended, waiting, works), 3, patience=1) is None
    assert rank_records.find_deadlock(by_rank(ended, waiting), 3, patience=1) is None
    assert rank_records.find_deadlock(by_rank(ended, other), 2, patience=1) is None
    assert rank_records.find_deadlock(by_rank(ended, waiting), 2, patience=3600) is None
