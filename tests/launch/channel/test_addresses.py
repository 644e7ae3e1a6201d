"""Which names are those of this host."""

from __future__ import annotations

import socket

import pytest

from tarantella_pp.launch.channel import addresses


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.1.1", True), ("fe80::1%eth7", True), ("10.0.0.1", True), ("10.0.0.2", False)],
)
def test_a_full_name_may_stand_for_any_loopback_address(
    address: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    entry = (family, socket.SOCK_STREAM, 6, "", (address, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    own = {"127.0.0.1", "10.0.0.1", "fe80::1"}
    assert addresses.is_here("alpha.cluster.example", own) == here
