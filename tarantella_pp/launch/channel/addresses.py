"""Under which addresses other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9


def own_addresses() -> set[str]:
    """Returns all addresses of this host, those only it knows included."""
    links = psutil.net_if_addrs().values()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        address.address.partition("%")[0]
        for link in links
        for address in link
        if address.family in families
    }


def towards(hosts: Sequence[str]) -> list[str]:
    """Returns the addresses of this host, those of its links to some other hosts first."""
    found = [address for host in hosts for address in _route(host)]
    parsed = sorted(map(ipaddress.ip_address, own_addresses()), key=lambda a: (a.version, int(a)))
    found += [str(a) for a in parsed if not a.is_loopback and not a.is_link_local]
    return [*dict.fromkeys(found)] or [LOOPBACK]


def is_here(host: str, own: set[str] | None = None) -> bool:
    """Whether a name or an address is that of this host.

    Some systems have their own full name stand for a loopback address that no link has, such as
    127.0.1.1.
    """
    if host in ("localhost", socket.gethostname()):
        return True
    own = own_addresses() if own is None else own
    found = [address.partition("%")[0] for _, address in _resolved(host)]
    return any(one in own or ipaddress.ip_address(one).is_loopback for one in found)


def _resolved(host: str) -> list[tuple[int, str]]:
    """Returns the families and addresses of a host; none for a name of ssh's configuration."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(entry[0], str(entry[4][0])) for entry in found]


def _route(host: str) -> list[str]:
    """Returns the addresses from which packets to a host would leave. None is sent."""
    found = []
    for family, address in _resolved(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _ANY_PORT))
                found.append(str(probe.getsockname()[0]))
            except OSError:
                continue
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]
