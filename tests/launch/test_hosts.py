"""Which ranks run where, what they find in their environment, and what is read of their lines."""

import os
import pathlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch import environment, hosts
from tarantella_pp.launch.hosts import Host, place, read_hostfile, that_answer, with_room
from tarantella_pp.launch.records import FAILED, Records, without_records, write, write_all

HOSTFILE = """
# a cluster
node-1          # one without a number
node-2:4
 10.0.0.3 slots=2
node.four  slots = 16   # as Open MPI writes it
"""


def hostfile(folder: pathlib.Path, text: str, encoding: str = "utf-8") -> str:
    path = folder / "hosts"
    path.write_text(text, encoding)
    return str(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # as Windows writes it
def test_lines_of_both_mpis_are_read(tmp_path, encoding):
    assert read_hostfile(hostfile(tmp_path, HOSTFILE, encoding)) == (
        Host("node-1"),
        Host("node-2", 4),
        Host("10.0.0.3", 2),
        Host("node.four", 16),
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no host"),
        ("a\nb\na:2\n", "Received twice: a"),
        ("a\n-oProxyCommand=x\n", "line 2: expected `host`"),
        ("a:0\n", "Received: 'a:0'"),
        ("[fd00::1]:4\n", "line 1: expected `host`"),  # both MPIs would look for a host `[`
        ("a b\n", "Received: 'a b'"),
        ("a slots=2 max_slots=4\n", "line 1"),
        ("a:2 slots=2\n", "line 1"),
        ("a;reboot\n", "line 1"),
    ],
)
def test_other_lines_are_refused(tmp_path, text, complaint):
    with pytest.raises(ConfigurationError) as error:
        read_hostfile(hostfile(tmp_path, text))
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("slots", "ranks", "per_node", "expected"),
    [
        ([None, None], None, None, [1, 1]),
        ([None, 3], None, None, [1, 3]),
        ([None, None], None, 4, [4, 4]),
        ([4, 4], 3, 2, [2, 1]),
        ([2, 2], 5, None, "take 4 ranks; ask for fewer, or give them more slots"),
        ([None, None], 5, 2, "more --n-per-node. Received: -n 5"),
        ([4, 2], None, 3, "host h1 has slots, which are 2"),
    ],
)
def test_hosts_are_filled_one_after_the_other_and_never_more(slots, ranks, per_node, expected):
    hosts = [Host(f"h{index}", each) for index, each in enumerate(slots)]
    if isinstance(expected, list):
        assert [len(h.ranks) for h in place(with_room(hosts, ranks, per_node), ranks)] == expected
        return
    with pytest.raises(ConfigurationError) as error:
        place(with_room(hosts, ranks, per_node), ranks)
    assert expected in str(error.value)


@given(st.lists(st.none() | st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 20))
def test_ranks_of_a_host_are_neighbours(slots, ranks):
    hosts = [Host(f"h{index}", each) for index, each in enumerate(slots)]
    try:
        placed = place(with_room(hosts, ranks), ranks)
    except ConfigurationError:
        assert ranks > sum(1 if each is None else each for each in slots)
        return
    assert [r for h in placed for r in h.ranks] == [*range(ranks)]
    assert all(host.ranks for host in placed)
    assert [host.name for host in placed] == [host.name for host in hosts[: len(placed)]]
    most = {host.name: host.slots for host in hosts}
    if any(each is not None for each in slots):
        assert all(len(host.ranks) <= (most[host.name] or 1) for host in placed)
    else:
        assert len(placed[0].ranks) - len(placed[-1].ranks) <= 1


def test_a_host_that_is_left_takes_no_more_ranks_than_before():
    for slots, ranks, per_node, left in [(None, 4, None, 2), (3, 4, None, 3), (None, 3, 2, 2)]:
        first = with_room([Host("a", slots), Host("b", slots)], ranks, per_node)
        assert sum(len(host.ranks) for host in place(first, ranks)) == ranks
        assert [len(host.ranks) for host in place(first[1:], ranks)] == [left]


def test_hosts_are_asked_all_at_once_and_this_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "_ANSWER_SECONDS", 3.0)
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\ncase "$2" in near) exec $3 ;; s*) exec sleep 60 ;; esac; exit 9')
    shell.chmod(0o700)
    names = ["slow-1", "near", "far", "localhost", "slow-2"]
    left = that_answer([Host(name) for name in names], [str(shell), "-option"])
    assert left == (Host("near"), Host("localhost"))


def variables(given: dict[str, str]) -> dict[str, str]:
    return environment.rank_environment("WARNING", given)


def test_what_is_set_leaves_what_the_user_has_set():
    found = variables({})
    assert found["TF_CPP_MIN_LOG_LEVEL"] == "1"  # warnings are shown
    given = {"MALLOC_TRIM_THRESHOLD_": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}
    assert not set(variables(given)) & set(given)


def test_what_other_hosts_need_is_the_users_own_and_no_secret():
    needed = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "UCX_TLS", "OMP_NUM_THREADS")
    needed += ("TNT_WARN", "TF_X", "KERAS_BACKEND")
    others = ("HOME", "HUB_TOKEN", "HOSTNAME", "TMPDIR")
    assert environment.needed_elsewhere(dict.fromkeys(needed + others, "")) == sorted(needed)


@pytest.mark.parametrize(("machine", "value"), [("x86_64", "1"), ("aarch64", None)])
def test_onednn_is_asked_for_where_tensorflow_has_it_for_all_processors(
    machine, value, monkeypatch
):
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    assert variables({}).get("TF_ENABLE_ONEDNN_OPTS") == value
    assert "TF_ENABLE_ONEDNN_OPTS" not in variables({"TF_ENABLE_ONEDNN_OPTS": "0"})


def test_exports_have_names_and_values():
    given = {"HOME": "/home/x"}
    found = environment.parse_exports(["A=1", "B=x=y", "C=", "HOME"], given)
    assert found == {"A": "1", "B": "x=y", "C": "", "HOME": "/home/x"}
    for wrong in ("=1", "A B=1", "1A=2", "UNSET"):
        with pytest.raises(ConfigurationError, match=wrong.partition("=")[0] or "=1"):
            environment.parse_exports([wrong], given)


INFO = b"I0000 00:00:1795359673.039961   13910 port.cc:153] oneDNN custom operations are on.\n"
FLOAT64 = b"W0000 00:00:1795364491.109910   31503 util.cc:163] Not handling type DT_DOUBLE\n"
NO_GPU = b"E0000 00:00:1795706599.671005 22602 x.cc:52] failed call to cuInit: X (303)\n"
PREFACE = b"WARNING: All log messages before absl::InitializeLog() is called are written\n"
KEPT = b"W0000 00:00:1795359673.0 1 x.cc:1] careful\nWARNING: yours\nI see\n\nE0000 00:00:1 x] no\n"
KEPT += b"I1127 23:00:00.123456 139 train.py:3] loss 0.5\nfound " + INFO + b"not all " + PREFACE


def passed(*pieces: bytes, records: Records | None = None) -> bytes:
    return b"".join(without_records(pieces, (Records(1) if records is None else records).take))


@pytest.mark.parametrize("label", [b"", b"[1] ", b"1: ", b"[prterun-vm-1@1,0]<stderr>: "])
@pytest.mark.parametrize("size", [7, 1000])
def test_only_info_of_native_code_is_left_out(label, size):
    text = b"".join(
        label + line for line in (PREFACE + INFO + KEPT + FLOAT64 + NO_GPU + INFO).splitlines(True)
    )
    if size > len(label + PREFACE):
        assert passed(text) == b"".join(label + line for line in KEPT.splitlines(True))
    assert passed(*(KEPT[i : i + size] for i in range(0, len(KEPT), size))) == KEPT


def test_what_ends_no_line_is_not_held_back():
    pieces = [b"Password: ", b"\rbar 1", b"\rbar 2\n", INFO[:30], INFO[30:], b"end"]
    read: list[bytes] = []
    found = without_records((read.append(piece) or piece for piece in pieces), print)
    for piece in pieces[:3]:
        assert next(found) == piece
        assert read[-1] == piece
    assert [*found] == [b"end"]


def test_noise_of_one_rank_after_the_progress_bar_of_another():
    assert passed(b"\rbar 1" + PREFACE + INFO, b"\rbar 2\n") == b"\rbar 1\rbar 2\n"
    assert passed(b"\rbar 1" + INFO[:30], INFO[30:], b"\rbar 2\n") == b"\rbar 1\rbar 2\n"


@pytest.mark.parametrize("label", [b"", b"[1] ", b"1: ", b"[prterun-vm-1@1,0]<stderr>: "])
@pytest.mark.parametrize("size", [1, 100, 1 << 16])
def test_records_are_taken_out_with_long_tracebacks(label, size):
    details = "long\n" * 2000 + "ü\n"
    source, target = os.pipe()
    write(target, 1, state=FAILED, cause="ü: nö", details=details, exit_code=3)
    os.close(target)
    lines = [label + line for line in os.read(source, 1 << 16).splitlines(True)]
    assert max(map(len, lines)) < 4096  # what a pipe takes at once
    text = b"\rbar x" + b"".join(lines[:2]) + b"mine\n" + b"".join(lines[2:]) + b"end\n"
    os.close(source)
    pieces, found = [text[i : i + size] for i in range(0, len(text), size)], Records(2)
    shown = passed(*pieces, records=found)
    if not label or size > 100:  # in pieces a label may be there before its record
        assert shown == b"\rbar xmine\nend\n"
    assert found[1].details == details
    assert (found[1].cause, found[1].exit_code) == ("ü: nö", 3)


def test_a_record_behind_a_separator_of_the_script_is_taken():
    found = Records(1)
    assert passed(b'mine\x1e\x1e\x1e{"rank": 0, "state": "failed"}\n', records=found) == b"mine"
    assert found[0].state == FAILED


def test_what_is_no_record_is_left_out():
    found = Records(1)
    for line in (b"{", b"[]", b'{"rank": "x"}', b'{"rank": 0, "more": 1}'):
        found.take(line)
    assert not found


def test_a_pipe_that_does_not_block_gets_all():
    """As where another process has set the terminal so."""
    source, target = os.pipe()
    os.set_blocking(target, False)
    text = b"x" * (1 << 18)
    writer = threading.Thread(target=write_all, args=(target, text))
    writer.start()
    found = b""
    while len(found) < len(text):
        found += os.read(source, 1 << 16)
    writer.join()
    assert found == text
    os.close(source)
    os.close(target)
