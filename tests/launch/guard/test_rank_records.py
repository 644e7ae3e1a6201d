"""Records of ranks, and what is concluded from them."""

from __future__ import annotations

import pathlib
import time

from tarantella_pp.launch.guard import rank_records
from tarantella_pp.launch.guard.rank_records import (
    FAILED,
    FINISHED,
    RETURNED,
    STARTED,
    Record,
)

NOW = time.time()


def record(rank: int, state: str, age: float = 10.0, **changes) -> Record:
    return Record(rank, state, pid=1, host="h", time=NOW - age, **changes)


def by_rank(*found: Record) -> dict[int, Record]:
    return {one.rank: one for one in found}


def test_a_record_comes_back_as_it_was(tmp_path: pathlib.Path) -> None:
    directory = rank_records.RunDirectory(tmp_path)
    first = record(3, FAILED, cause="é\n", details="x" * 10_000, exit_code=5, culprit=2)
    directory.write(first)
    assert directory.read() == {3: first}
    directory.write(first.becomes(FINISHED, cause="no"))
    assert directory.read()[3].state == FINISHED
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.json"]


def test_a_changed_directory_is_read_again(tmp_path: pathlib.Path) -> None:
    reader, writer = rank_records.RunDirectory(tmp_path), rank_records.RunDirectory(tmp_path)
    for count in range(1, 5):
        writer.write(record(count, STARTED))
        assert len(reader.read()) == count


def test_a_missing_directory_and_damaged_files_count_as_nothing(tmp_path: pathlib.Path) -> None:
    gone = rank_records.RunDirectory(tmp_path / "gone")
    gone.write(record(0, STARTED))
    assert gone.read() == {}
    assert gone.stop_requests() == set()
    for text in ("", "[]", '{"rank": 1}', '{"rank": '):
        (tmp_path / "rank-0.json").write_text(text)
        assert rank_records.RunDirectory(tmp_path).read() == {}


def test_stop_requests_are_seen(tmp_path: pathlib.Path) -> None:
    rank_records.RunDirectory(tmp_path).request_stop(15)
    assert rank_records.RunDirectory(tmp_path).stop_requests() == {15}


def test_the_first_failure_is_the_oldest() -> None:
    found = by_rank(record(0, FAILED, 3), record(1, FAILED, 5), record(2, RETURNED, 9))
    assert rank_records.first_failure(found) == found[1]
    assert rank_records.first_failure(by_rank(record(0, RETURNED), record(1, STARTED))) is None


def test_a_consequence_does_not_hide_its_cause() -> None:
    found = by_rank(record(0, FAILED, 5, culprit=1), record(1, FAILED, 3))
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
