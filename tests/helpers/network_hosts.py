"""Hosts with a network between them, made of namespaces of this machine.

Each has a name, an address, processes, /dev/shm and a folder for temporary files of its own; the
rest of the file system is shared. That needs Linux, root and `ip`. A namespace of its own has the
bridge that joins them. As ssh, the remote shell gives a command no variables of its caller.
"""

import contextlib
import functools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from tarantella_pp.launch.processes import die_with_parent
from tests.helpers.jobs import SCRIPTS, Job, executable

LIMIT_SECONDS = 40
_SHELL = """\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
*) echo "no route to $1" >&2; exit 255 ;;
esac
shift
exec nsenter -t "$pid" -n -u -m -w/ env -i PATH="$PATH" HOME=/root TMPDIR={tmp} sh -c "$*"
"""


@dataclass
class NetworkHost:
    """One host; its folders have the same paths on each host, but are others."""

    name: str
    holder: subprocess.Popen[bytes]  # keeps its namespaces
    tmp: pathlib.Path
    work: pathlib.Path

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-u", "-m", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.inside(*command), check=True, timeout=LIMIT_SECONDS)

    def seen(self, path: str | pathlib.Path) -> pathlib.Path:
        """Returns what this host sees at a path, from outside."""
        return pathlib.Path(f"/proc/{self.holder.pid}/root{path}")

    def processes(self) -> list[psutil.Process]:
        own = _network_of(self.holder.pid)
        found = [p for p in psutil.process_iter() if p.pid != self.holder.pid]
        return [p for p in found if own is not None and _network_of(p.pid) == own]

    def leftovers(self) -> list[str]:
        """Returns what has stayed behind on this host, for which it gets a moment to go."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            left = list(map(str, [*self.processes(), *self.seen(self.tmp).iterdir()]))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)


@dataclass
class Network:
    switch: NetworkHost
    hosts: list[NetworkHost]
    remote_shell: str = ""

    def hostfile(self, *lines: str) -> str:
        """Returns the path of a hostfile, with a line for each host if none are given."""
        path = self.hosts[0].tmp.parent / "hosts"
        path.write_text("\n".join([*(lines or [host.name for host in self.hosts]), ""]))
        return str(path)

    def tarantella(
        self, python: str, *arguments: str, folder: pathlib.Path = SCRIPTS, **environment: str
    ) -> Job:
        """Starts `tarantella`, or `tarantella doctor`, in a folder of the first host."""
        given = {"UCX_TLS": "tcp,self", "TMPDIR": str(self.hosts[0].tmp), **environment}
        options = ["--hostfile", self.hostfile()] if "--hostfile" not in arguments else []
        options += [] if "--remote-shell" in arguments else ["--remote-shell", self.remote_shell]
        first = ["doctor"] if arguments[0] == "doctor" else []
        command, arguments = [python, "-m", "tarantella_pp", *first], arguments[len(first) :]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
        return Job(*self.hosts[0].inside(*there, *command, *options, *arguments), **given)


@functools.cache
def obstacle() -> str:
    """Returns why no hosts can be made here, or the empty string."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    links = "ip link add eth0 type veth peer name eth1 && ip link add bridge0 type bridge"
    tried = f"{links} && mount -t tmpfs tmpfs /mnt"
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", tried]
    answer = subprocess.run(command, capture_output=True, timeout=LIMIT_SECONDS, check=False)
    return "" if answer.returncode == 0 else "namespaces, veth or mounts are not allowed"


@contextlib.contextmanager
def network(
    size: int, folder: pathlib.Path, names: Sequence[str] = ("alpha", "beta")
) -> Iterator[Network]:
    names = names[:size]
    addresses = [f"10.97.0.{number + 1}" for number in range(size)]
    pairs = zip(addresses, names, strict=True)
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in pairs)]
    (folder / "etc_hosts").write_text("\n".join([*lines, ""]))
    tmp, work = folder / "tmp", folder / "work"
    tmp.mkdir()
    work.mkdir()
    found: list[NetworkHost] = []
    try:
        all_names = ("switch", *names)
        found.extend(NetworkHost(name, _holder(name, folder), tmp, work) for name in all_names)
        made = Network(found[0], found[1:])
        _join(made, addresses)
        cases = [f"{host.name}) pid={host.holder.pid} ;;" for host in made.hosts]
        text = _SHELL.format(cases="\n".join(cases), tmp=shlex.quote(str(tmp)))
        made.remote_shell = str(executable(folder / "remote-shell", text))
        yield made
    finally:
        for host in found:
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            host.holder.kill()
            host.holder.wait()


def _holder(name: str, folder: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts the process of a host, and returns once it has all its own."""
    setup = (
        "hostname $0 && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs $1/tmp "
        "&& mount -t tmpfs tmpfs $1/work && mount --bind $1/etc_hosts /etc/hosts "
        "&& ip link set lo up && echo ready && exec sleep 600"
    )
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", setup, name, str(folder)]
    holder = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n"
    return holder


def _join(made: Network, addresses: list[str]) -> None:
    made.switch.run(*["ip", "link", "add", "bridge0", "type", "bridge"])
    made.switch.run(*["ip", "link", "set", "bridge0", "up"])
    for number, (host, address) in enumerate(zip(made.hosts, addresses, strict=True)):
        other = f"netns {host.holder.pid}"
        link = f"ip link add port{number} type veth peer name eth0 {other}"
        made.switch.run(*link.split())
        made.switch.run(*f"ip link set port{number} master bridge0 up".split())
        host.run(*f"ip address add {address}/24 dev eth0".split())
        host.run(*["ip", "link", "set", "eth0", "up"])


def _network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
