"""Messages over a connection."""

from __future__ import annotations

import socket
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch.channel import line as lines
from tarantella_pp.launch.channel.line import Line

MESSAGES = st.lists(
    st.dictionaries(st.text(), st.text() | st.integers() | st.none(), max_size=3), max_size=4
)


@given(MESSAGES, st.lists(st.integers(0, 300), max_size=6))
def test_messages_come_as_they_were_sent_however_they_are_cut(messages, cuts) -> None:
    one, other = socket.socketpair()
    sender, receiver = Line(one), Line(other)
    for message in messages:
        sender._outgoing += lines.json.dumps(message).encode() + b"\n"
    whole, found = bytes(sender._outgoing), []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(whole)], strict=True):
        one.send(whole[begin:end])
        found += receiver.receive()
    assert found == messages
    sender.close()
    assert receiver.receive(1.0) == []
    assert receiver.ended == ""
    receiver.close()


def test_more_than_the_system_takes_at_once_is_sent_later() -> None:
    sender, receiver = map(Line, socket.socketpair())
    big = {"details": "x" * 3_000_000}
    sender.send(big)
    assert sender.unsent
    found = []
    while not found:
        sender.flush()
        found = receiver.receive()
    assert found == [big]
    assert not sender.unsent
    for end in (sender, receiver):
        end.close()


def test_a_line_is_left_once_all_is_read() -> None:
    sender, receiver = map(Line, socket.socketpair())
    receiver.send({"late": 1})  # never read, and yet it does not destroy what follows
    sender.send({"last": 1})
    assert receiver.receive_one(1.0) == {"last": 1}
    receiver.close()
    sender.leave(5.0)
    assert sender.ended == ""


@pytest.mark.parametrize("text", [b"[]\n", b"no json\n", b"\xff\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_message_ends_the_connection(text: bytes) -> None:
    one, other = socket.socketpair()
    receiver = Line(other, most_bytes=200_000)
    one.sendall(text)
    while receiver.ended is None:
        assert receiver.receive(1.0) == []
    assert receiver.ended.startswith("received ")
    one.close()
    receiver.close()


def test_a_message_that_never_ends_is_not_kept() -> None:
    one, other = socket.socketpair()
    receiver = Line(other, most_bytes=100)
    one.sendall(b"x" * 101)
    receiver.receive(1.0)
    assert receiver.ended == "received a message that is too long"
    one.close()
    receiver.close()


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("0", 0.0), ("2.5", 2.5)])
def test_the_heartbeat_is_that_of_the_environment(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNT_HEARTBEAT", text)
    assert lines.heartbeat_seconds() == seconds
    with socket.socket() as sock:
        lines.keep_alive(sock, seconds)
        on = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert bool(on) == bool(seconds)
        if seconds and hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == 1000 * seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_heartbeat_that_is_no_number_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TNT_HEARTBEAT", text)
    with pytest.raises(ConfigurationError, match=f"TNT_HEARTBEAT is .* Received: '{text}'"):
        lines.heartbeat_seconds()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells when something was heard last")
def test_a_silent_host_ends_a_line_also_while_a_message_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(socket.create_connection(server.getsockname()))
        other = Line(server.accept()[0])
    line.send({"one": 1})
    assert other.receive_one(1.0) == {"one": 1}
    time.sleep(0.2)
    told = line._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, lines._TCP_INFO.size)
    assert all(150 <= age < 30_000 for age in lines._TCP_INFO.unpack(told))
    line.end_if_silent(60.0)
    line.end_if_silent(0.0)
    assert line.ended is None
    monkeypatch.setattr(lines, "_SHORTEST_SECONDS", 0.05)
    line.send({"two": 2})
    assert other.receive_one(1.0) == {"two": 2}
    line.end_if_silent(0.1)
    assert line.ended is None  # it has got that
    time.sleep(0.2)
    line.end_if_silent(0.1)
    assert line.timed_out
    assert line.ended == "Connection timed out"
    line.close()
    other.close()
