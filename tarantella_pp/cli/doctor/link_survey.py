"""The links between hosts, measured: pair by pair, in one job if all reach each other."""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tarantella_pp.cli.doctor import probe_job
from tarantella_pp.cli.doctor.host_survey import HostFacts
from tarantella_pp.cli.doctor.probe_job import Link, Probed

START_SECONDS, PAIR_SECONDS, COMPUTE_SECONDS = 40.0, 5.0, 120.0
"""How long a job may take to start, to measure a pair, and what a rank computes."""
ALONE_SECONDS = 300.0
"""How long pairs are measured in jobs of their own, all together."""
MANY = 10
"""From how many links on it is said that they take a while."""
SLOW = 3.0
"""A link is slow if the median one has so many times its bandwidth."""
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """What is known of the links between hosts.

    Attributes:
        links: Pairs of hosts, with what messages between them need.
        dead: Pairs between which none came through, with what the job has said.
        unknown: Pairs that there was no time for.
        rank: What the slowest rank does; empty if it was not measured.
        why: What the job of all hosts had to say; empty if it ended well.
    """

    links: dict[Pair, Link] = field(default_factory=dict)
    dead: dict[Pair, str] = field(default_factory=dict)
    unknown: tuple[Pair, ...] = ()
    rank: dict[str, float] = field(default_factory=dict)
    why: str = ""

    def findings(self) -> Iterator[str]:
        """Yields what is wrong, and what to do about it."""
        if self.dead:
            reasons = [why for why in self.dead.values() if why] or ["no message came"]
            yield (
                f"No messages of MPI pass between {_named(self.dead)}: {reasons[0].rstrip('.')}. "
                "Let connections between the hosts of a job pass the firewall, and name the "
                "network for MPI if there are several: UCX_NET_DEVICES=eth0 for MPICH, "
                "--mpi-args='--mca btl_tcp_if_include eth0' for Open MPI."
            )
        if self.unknown:
            yield (
                f"The time was up before {_named(self.unknown)} were tried, as messages between "
                "others did not pass. Run this again on a part of the hosts."
            )
        if self.why and self.links and not (self.dead or self.unknown):
            yield f"The job that measured the links failed: {self.why.rstrip('.')}."
        middle = statistics.median([link.bandwidth_gb_per_s for link in self.links.values()] or [0])
        slow = [p for p, link in self.links.items() if SLOW * link.bandwidth_gb_per_s < middle]
        if slow:
            least = min(self.links[pair].bandwidth_gb_per_s for pair in slow)
            yield (
                f"Messages between {_named(slow)} are slow, {least:.3g} GB/s at worst, where half "
                f"of all links have {middle:.3g} GB/s or more: check cables and network cards, or "
                "leave the host out that they have in common."
            )


def measure_links(
    hosts: Sequence[HostFacts], arguments: argparse.Namespace, *, compute: bool = False
) -> MeasuredLinks:
    """Measures the links between all hosts.

    One job measures one pair after the other. If it ends before all are measured, the others are
    measured in jobs of their own, so that one dead link does not hide the rest.
    """
    pairs = list(itertools.combinations([host.host for host in hosts], 2))
    seconds = START_SECONDS + PAIR_SECONDS * len(pairs) + compute * COMPUTE_SECONDS
    if len(pairs) > MANY:
        sys.stderr.write(
            f"{len(pairs)} links are measured, within {seconds:.0f} s if none is dead\n"
        )
    found, probed = _in_one_job(hosts, arguments, seconds, compute)
    left = [pair for pair in pairs if pair not in found]
    if len(pairs) == 1:
        return MeasuredLinks(found, dict.fromkeys(left, probed.why), (), probed.rank, probed.why)
    dead, deadline = {}, time.monotonic() + ALONE_SECONDS
    by_name = {host.host: host for host in hosts}
    while left and time.monotonic() < deadline:
        pair = left.pop(0)
        two, seconds = [by_name[name] for name in pair], START_SECONDS + PAIR_SECONDS
        alone, why = _in_one_job(two, arguments, seconds)
        found |= alone
        if not alone:
            dead[pair] = why.why
    in_order = {pair: found[pair] for pair in pairs if pair in found}
    return MeasuredLinks(in_order, dead, tuple(left), probed.rank, probed.why)


def _in_one_job(
    hosts: Sequence[HostFacts],
    arguments: argparse.Namespace,
    seconds: float,
    compute: bool = False,
) -> tuple[dict[Pair, Link], Probed]:
    """Measures what it can, with one rank on each host unless they are to compute as well."""
    counts = [host.slots or 1 if compute else 1 for host in hosts]
    first = [0, *itertools.accumulate(counts)][:-1]
    names = {rank: host.host for rank, host in zip(first, hosts, strict=True)}
    with tempfile.TemporaryDirectory(prefix="tarantella-doctor-") as folder:
        path = pathlib.Path(folder, "hosts")
        lines = [f"{_in_file(name)}:{n}\n" for name, n in zip(names.values(), counts, strict=True)]
        path.write_text("".join(lines), encoding="utf-8")
        options = ["--hostfile", str(path), "--mpi", arguments.mpi, *_reach(arguments)]
        options.append("--share-gpus" if compute else "--no-gpu")
        probed = probe_job.probe(options, first, seconds, compute=compute)
    return {(names[a], names[b]): link for (a, b), link in probed.links.items()}, probed


def _reach(arguments: argparse.Namespace) -> list[str]:
    """Returns the options that say how hosts are reached."""
    given = {
        "--remote-shell": arguments.remote_shell,
        "--mpi-args": arguments.mpi_args,
        "--python-interpreter": arguments.python_interpreter,
    }
    return [f"{option}={value}" for option, value in given.items() if value is not None]


def _in_file(name: str) -> str:
    """Returns a host as a hostfile has it."""
    return f"[{name}]" if ":" in name else name


def _named(pairs: Sequence[Pair] | dict[Pair, str]) -> str:
    """Returns the names of pairs."""
    return ", ".join(f"{one} and {other}" for one, other in pairs)
