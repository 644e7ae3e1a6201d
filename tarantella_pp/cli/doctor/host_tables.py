"""The tables of `tarantella doctor --hostfile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tarantella_pp.cli.doctor.host_survey import HostFacts
from tarantella_pp.cli.doctor.link_survey import MeasuredLinks

if TYPE_CHECKING:
    from rich.table import Table

VERSIONS = {
    "python": "Python",
    "tarantella_pp": "tarantella",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "MPI": "MPI",
}
"""What is compared, with what a table calls it."""


def table_of_hosts(hosts: Sequence[HostFacts]) -> Table:
    """Returns a row for each host: its names, versions, cores, GPUs, clock."""
    from rich.table import Table

    table = Table(box=None, collapse_padding=True, pad_edge=False)
    for title in ("host", *VERSIONS.values()):
        table.add_column(title, overflow="fold")
    for title in ("cores", "GPUs", "clock"):
        table.add_column(title, justify="right")
    for host in hosts:
        table.add_row(
            _names(host),
            *(_version(host, package) for package in VERSIONS),
            _number(host.cores),
            _number(host.gpus),
            _clock(host.ahead),
        )
    return table


def table_of_links(links: MeasuredLinks) -> Table:
    """Returns a row for each pair of hosts: latency and bandwidth of messages."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("host", "host"):
        table.add_column(title, overflow="fold")
    for title in ("latency", "bandwidth"):
        table.add_column(title, justify="right")
    for pair, link in links.links.items():
        bandwidth = f"{link.bandwidth_gb_per_s:.3g} GB/s"
        table.add_row(*pair, f"{link.latency_us:.4g} us", bandwidth)
    for pair in links.dead:
        table.add_row(*pair, "none", "none")
    return table


def _names(host: HostFacts) -> str:
    """Returns the name in the hostfile, and the one that the host says, if it is another."""
    if host.silence:
        return f"{host.host} (silent)"
    return host.host if host.host == host.name else f"{host.host} ({host.name})"


def _version(host: HostFacts, package: str) -> str:
    """Returns a version, if the host has said it."""
    known = package in host.versions and not host.silence
    return host.versions[package] or "none" if known else "-"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _clock(ahead: float | None) -> str:
    """Returns how far a clock is off."""
    if ahead is None:
        return "-"
    return "right" if abs(ahead) < 1.0 else f"{ahead:+.0f} s"
