"""The hub: whom it listens to, and what it passes on."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch.channel.hub import Hub
from tarantella_pp.launch.channel.joining import Whereabouts, join
from tarantella_pp.launch.channel.line import Line
from tarantella_pp.launch.channel.rank_records import (
    FAILED,
    FINISHED,
    RETURNED,
    STARTED,
    RankRecords,
    Record,
)

TURN = threading.Lock()
"""A hub belongs to one thread at a time."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of three ranks that works beside the test."""
    made, ended = Hub(3), threading.Event()

    def work() -> None:
        while not ended.is_set():
            with TURN:
                made.poll(0.01)
            time.sleep(0.001)

    worker = threading.Thread(target=work)
    worker.start()
    yield made
    ended.set()
    worker.join()
    made.close()


def eventually(condition: Callable[[], object]) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def joined(hub: Hub, rank: int) -> RankRecords:
    line, welcome = join(hub.whereabouts, rank)
    return RankRecords(line, welcome.get("records"))


def test_ranks_learn_who_has_ended_and_who_waits_and_nothing_else(hub: Hub) -> None:
    one, two = joined(hub, 0), joined(hub, 1)
    one.write(Record.of_this_process(0, STARTED))
    two.write(Record.of_this_process(1, STARTED))
    eventually(lambda: len(hub.records) == 2)
    two.write(Record.of_this_process(1, STARTED).becomes(STARTED, waiting_at="t.py:1 c.recv"))
    eventually(lambda: 1 in one.read())
    assert one.read()[1].waiting_at == "t.py:1 c.recv"
    two.write(Record.of_this_process(1, STARTED).becomes(STARTED))
    eventually(lambda: not one.read()[1].waiting_at)
    failed = Record.of_this_process(1, STARTED).becomes(
        FAILED, cause="é\udcff", details="x" * 100_000, exit_code=5, culprit=2
    )
    two.write(failed)
    eventually(lambda: one.read()[1].state == FAILED)
    heard = one.read()[1]
    assert dataclasses.replace(heard, time=failed.time, order=0) == failed
    late = joined(hub, 2)
    assert late.read()[1].cause == failed.cause
    assert 0 not in late.read()


def test_records_are_ordered_as_they_come_whatever_clocks_say(hub: Hub) -> None:
    one, two = joined(hub, 0), joined(hub, 1)
    ahead = dataclasses.replace(Record.of_this_process(1, RETURNED), time=1e9)
    two.write(ahead)
    eventually(lambda: hub.records.get(1))
    one.write(dataclasses.replace(Record.of_this_process(0, RETURNED), time=-1e9))
    one.wait_for_order(0, 20)
    two.wait_for_order(1, 20)
    assert one.read()[0].order > one.read()[1].order == two.read()[1].order
    assert abs(one.read()[1].time - time.monotonic()) < 60


def test_the_secret_is_needed_on_both_sides(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TNT_HEARTBEAT", "0.2")  # so long is it tried again
    wrong = dataclasses.replace(hub.whereabouts, secret="0" * 32)
    with pytest.raises(LaunchError, match=f"host {os.uname().nodename} cannot reach"):
        join(wrong, 0)
    assert not hub.records

    def pretend(listener: socket.socket) -> None:
        while True:
            try:
                line = Line(listener.accept()[0])
            except OSError:
                return
            line.send({"nonce": "0"})
            line.receive(5.0)
            line.send({"proof": "0", "records": []})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,), daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match="another service answers there"):
            join(Whereabouts(("127.0.0.1",), port, "1" * 32), 0)


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\n\n", b"{}\n", b"x" * 9999, b'{"rank": 0}\n'])
def test_strangers_are_sent_away(hub: Hub, text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hub.whereabouts.port), 20) as stranger:
        stranger.sendall(text)
        while True:  # the greeting, then the end
            try:
                if not stranger.recv(4096):
                    break
            except ConnectionResetError:
                break
    assert joined(hub, 0).read() == {}


def test_a_rank_speaks_for_itself_only(hub: Hub) -> None:
    one = joined(hub, 0)
    one.write(Record.of_this_process(1, FAILED))
    one.write(Record.of_this_process(0, FINISHED))
    eventually(lambda: hub.records)
    assert set(hub.records) == {0}


def test_a_job_of_one_host_listens_to_this_host_only() -> None:
    for hosts, here in ((None, ("127.0.0.1",)), ([], None)):
        hub = Hub(1, hosts)
        assert (hub._listener.getsockname()[0] == "127.0.0.1") == (hosts is None)
        assert here is None or hub.whereabouts.addresses == here
        parsed = Whereabouts.parse(str(hub.whereabouts), hub.whereabouts.secret)
        assert parsed == hub.whereabouts
        assert hub.whereabouts.secret not in str(hub.whereabouts)
        hub.close()


def test_a_broken_connection_is_noticed_and_ends_reach_all(hub: Hub) -> None:
    line, _ = join(hub.whereabouts, 0)
    other, _ = join(hub.whereabouts, 1)
    line.close()
    eventually(lambda: 0 in hub.lost and 1 in hub._members)
    with TURN:
        hub.request_stop(15)
        hub.request_stop(15)
    stops = [other.receive_one(20.0)]
    late, welcome = join(hub.whereabouts, 2)
    assert stops == [{"stop": 15}]
    assert welcome["stops"] == [15]
    other.send({"bye": True})
    other.leave(20.0)
    assert 1 not in hub.lost
    late.close()


@pytest.mark.parametrize(("state", "becomes"), [(RETURNED, FAILED), (FINISHED, FINISHED)])
def test_a_host_that_is_silent_has_failed_unless_its_rank_has_ended(
    hub: Hub, state: str, becomes: str
) -> None:
    rank = joined(hub, 0)
    rank.write(Record.of_this_process(0, state))
    eventually(lambda: 0 in hub.records)
    line = hub._members[0]
    with TURN:
        line.timed_out, line.ended = True, "silent"
    eventually(lambda: 0 in hub.lost)
    assert hub.records[0].state == becomes


def test_a_rank_that_joins_again_is_not_lost(hub: Hub) -> None:
    """Its first try took too long, so that it has tried another address of the launcher."""
    first, _ = join(hub.whereabouts, 0)
    first.close()
    eventually(lambda: 0 in hub.lost)
    second, _ = join(hub.whereabouts, 0)
    assert 0 not in hub.lost
    second.close()
