"""What is wrong with the hosts of a job, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tarantella_pp.cli.doctor.host_survey import HostFacts
from tarantella_pp.dependencies import INSTALL
from tarantella_pp.launch.channel.joining import unreachable

CLOCK_SECONDS = 5.0
"""How far apart clocks may be: what is measured through a remote shell is not exact."""
_REMEDIES = {
    "python": "name one Python with --python-interpreter, or install the same on all hosts",
    "tarantella_pp": "install the same version of this package on all hosts",
    "tensorflow": "install the same version on all hosts",
    "keras": "install the same version on all hosts",
    "MPI": "ranks find each other only with one MPI: install the same, or load the same module",
}
_MISSING = {
    **INSTALL,
    "MPI": "mpi4py and an MPI library, as with `pip install mpi4py mpich`, or your site's module",
}


def host_findings(here: HostFacts, hosts: Sequence[HostFacts]) -> list[str]:
    """Returns a sentence for each thing that is wrong, with its host and what to do."""
    return [
        *(finding for host in hosts for finding in _of_one(host)),
        *(finding for package in _REMEDIES for finding in _of_versions(package, here, hosts)),
        *_of_names(hosts),
        *_of_gpus(hosts),
    ]


def usable(here: HostFacts, hosts: Sequence[HostFacts]) -> list[HostFacts]:
    """Returns the hosts on which ranks of one job can find each other, each of them once."""
    found: dict[str, HostFacts] = {}
    for host in hosts:
        same = host.versions.get("MPI") == here.versions.get("MPI") is not None
        if same and not (host.silence or host.is_old or host.obstacles or not host.has_folder):
            found.setdefault(host.name, host)
    return list(found.values())


def _of_one(host: HostFacts) -> Iterator[str]:
    """Yields what is wrong with a host, whatever the others are."""
    if host.silence:
        yield host.silence
    if host.obstacles:
        text = unreachable(host.host, list(host.obstacles))
        yield f"{text[0].upper()}{text[1:]}."
    if not host.has_folder:
        yield (
            f"Host {host.host} has no folder like the one that this command runs in, where ranks "
            "are to start: share the folder, or copy it there."
        )
    if host.ahead is not None and abs(host.ahead) > CLOCK_SECONDS:
        way = "ahead of" if host.ahead > 0 else "behind"
        yield (
            f"The clock of host {host.host} is {abs(host.ahead):.0f} s {way} that of this one: "
            "have both set by NTP. Training does not need that, but times of files and logs do."
        )
    if host.cores is not None and (host.slots or 0) > host.cores:
        yield (
            f"Host {host.host} has {_count(host.cores, 'core')} for {host.slots} ranks: give its "
            f"line fewer, as in `{host.host}:{host.cores}`."
        )
    if host.gpus and (host.slots or 0) > host.gpus:
        yield (
            f"Host {host.host} has {_count(host.gpus, 'GPU')} for {host.slots} ranks, which need "
            f"--share-gpus or --no-gpu: or give its line fewer, as in `{host.host}:{host.gpus}`."
        )


def _of_versions(package: str, here: HostFacts, hosts: Sequence[HostFacts]) -> Iterator[str]:
    """Yields the hosts that lack a package, or have another version than this one.

    Where this host has none, as one that only starts jobs, the first host that has one counts.
    """
    asked = [host for host in hosts if not host.silence]
    having = [host for host in (here, *asked) if host.versions.get(package)]
    for host in asked:
        version = host.versions.get(package)
        if host.is_old and package == "tarantella_pp":
            yield (
                f"Host {host.host} has tarantella_pp {version or 'of an unknown version'}, this "
                f"one {here.versions[package]}, which is newer: {_REMEDIES[package]}."
            )
        elif version is None and package in _MISSING and not host.is_old:
            yield f"Host {host.host} has no {package}: install it there: {_MISSING[package]}."
        elif version is not None and _compared(package, version) != _compared(
            package, str(having[0].versions[package])
        ):
            first = "this one" if having[0] is here else f"host {having[0].host}"
            name = "" if package == "MPI" else f"{package} "
            yield (
                f"Host {host.host} has {name}{version}, {first} {having[0].versions[package]}: "
                f"{_REMEDIES[package]}."
            )


def _compared(package: str, version: str) -> str:
    """Returns what must agree of a version: patches of Python need not."""
    return ".".join(version.split(".")[:2]) if package == "python" else version


def _of_names(hosts: Sequence[HostFacts]) -> Iterator[str]:
    """Yields the hosts with several lines."""
    lines: dict[str, list[str]] = {}
    for host in hosts:
        if host.name and not host.silence:
            lines.setdefault(host.name, []).append(host.host)
    for name, given in lines.items():
        if len(given) > 1:
            yield (
                f"Hosts {', '.join(given)} say that their name is {name}: give one host one line, "
                "with its number of ranks behind it, or different hosts a name each."
            )


def _of_gpus(hosts: Sequence[HostFacts]) -> Iterator[str]:
    """Yields the hosts without a GPU, if others have some."""
    without = [host.host for host in hosts if host.gpus == 0]
    if without and any(host.gpus for host in hosts):
        yield (
            f"No GPU on {', '.join(without)}, but on other hosts: all would wait for ranks without "
            "one. Leave these hosts out, or train on CPUs with --no-gpu."
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
