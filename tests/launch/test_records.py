"""What is left out of the lines that ranks write, and what never is."""

import os
import threading

import pytest

from tarantella_pp.launch.records import FAILED, Records, without_records, write, write_all

INFO = b"I0000 00:00:1795359673.039961   13910 port.cc:153] oneDNN custom operations are on.\n"
FLOAT64 = b"W0000 00:00:1795364491.109910   31503 util.cc:163] Not handling type DT_DOUBLE\n"
PREFACE = b"WARNING: All log messages before absl::InitializeLog() is called are written\n"
KEPT = b"W0000 00:00:1795359673.0 1 x.cc:1] careful\nWARNING: yours\nI see\n\nE0000 00:00:1 x] no\n"


def passed(*pieces: bytes, records: Records | None = None) -> bytes:
    return b"".join(without_records(pieces, (Records(1) if records is None else records).take))


@pytest.mark.parametrize("label", [b"", b"[1] ", b"1: ", b"[prterun-vm-1@1,0]<stderr>: "])
@pytest.mark.parametrize("size", [7, 1000])
def test_only_info_of_native_code_is_left_out(label, size):
    text = b"".join(
        label + line for line in (PREFACE + INFO + KEPT + FLOAT64 + INFO).splitlines(True)
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
