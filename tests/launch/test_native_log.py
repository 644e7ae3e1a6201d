"""What is left out of the lines that ranks write, and what never is."""

from __future__ import annotations

import pytest

from tarantella_pp.launch.native_log import pass_on

INFO = b"I0000 00:00:1795359673.039961   13910 port.cc:153] oneDNN custom operations are on.\n"
FLOAT64 = b"W0000 00:00:1795364491.109910   31503 util.cc:163] Not handling type DT_DOUBLE\n"
PREFACE = b"WARNING: All log messages before absl::InitializeLog() is called are written\n"
KEPT = b"W0000 00:00:1795359673.0 1 x.cc:1] careful\nWARNING: yours\nI see\n\nE0000 00:00:1 x] no\n"


def passed(*pieces: bytes) -> bytes:
    rest, written = [*pieces, b""], []
    pass_on(lambda: rest.pop(0), written.append)
    return b"".join(written)


@pytest.mark.parametrize("label", [b"", b"[1] ", b"1: ", b"[prterun-vm-1@1,0]<stderr>: "])
@pytest.mark.parametrize("size", [7, 1000])
def test_only_info_of_native_code_is_left_out(label: bytes, size: int) -> None:
    text = b"".join(
        label + line for line in (PREFACE + INFO + KEPT + FLOAT64 + INFO).splitlines(True)
    )
    if size > len(label + PREFACE):
        assert passed(text) == b"".join(label + line for line in KEPT.splitlines(True))
    assert passed(*(KEPT[i : i + size] for i in range(0, len(KEPT), size))) == KEPT


def test_what_ends_no_line_is_not_held_back() -> None:
    written: list[bytes] = []
    pieces = [b"Password: ", b"\rbar 1", b"\rbar 2\n", INFO[:30], INFO[30:], b"end"]
    seen = []

    def read() -> bytes:
        seen.append(b"".join(written))
        return pieces.pop(0) if pieces else b""

    pass_on(read, written.append)
    assert seen[1:4] == [b"Password: ", b"Password: \rbar 1", b"Password: \rbar 1\rbar 2\n"]
    assert b"".join(written) == b"Password: \rbar 1\rbar 2\nend"


def test_noise_of_one_rank_after_the_progress_bar_of_another() -> None:
    assert passed(b"\rbar 1" + PREFACE + INFO, b"\rbar 2\n") == b"\rbar 1\rbar 2\n"
    assert passed(b"\rbar 1" + INFO[:30], INFO[30:], b"\rbar 2\n") == b"\rbar 1\rbar 2\n"
