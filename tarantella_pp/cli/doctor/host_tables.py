"""The tables of `tarantella doctor --hostfile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tarantella_pp.cli.doctor.host_survey import HostFacts

if TYPE_CHECKING:
    from rich.table import Table

VERSIONS = {
    "python": "Python",
    "tarantella_pp": "tarantella_pp",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "MPI": "MPI",
}
"""What is compared, with what a table calls it."""


def table_of_hosts(hosts: Sequence[HostFacts]) -> Table:
    """Returns a row for each host: its name, versions, cores, GPUs, clock."""
    from rich.table import Table

    table = Table(box=None)
    for title in ("host", "its name", *VERSIONS.values()):
        table.add_column(title, overflow="fold")
    for title in ("cores", "GPUs", "clock"):
        table.add_column(title, justify="right")
    for host in hosts:
        table.add_row(
            host.host,
            host.name or "no answer",
            *(_version(host, package) for package in VERSIONS),
            _number(host.cores),
            _number(host.gpus),
            _clock(host.ahead),
        )
    return table


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
