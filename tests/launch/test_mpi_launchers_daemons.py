"""Jobs inside an allocation of Slurm itself, of which this host is the only node.

Debian has all that it takes: `apt-get install slurmctld slurmd slurm-client munge`. Its daemons run
in namespaces, with a configuration, a key and folders of their own, and end with them.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

import pytest

from tests.helpers import network_hosts
from tests.helpers.jobs import SCRIPTS, Job, Result

_COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sinfo")
_MISSING = [name for name in _COMMANDS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}"),
    pytest.mark.skipif(bool(network_hosts.obstacle()), reason=network_hosts.obstacle() or "none"),
]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=node1
AuthInfo=socket={0}/munge.socket
SlurmUser=root
StateSaveLocation={0}/state
SlurmdSpoolDir={0}/spool
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/slurmd.pid
SlurmctldLogFile={0}/slurmctld.log
SlurmdLogFile={0}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node1 CPUs={1} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# A name is not looked up where there is no address but the loopback's.
SETUP = """\
set -e
cd "$0"
hostname node1
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 10.98.0.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
mount --bind etc_hosts /etc/hosts
munged --force --key-file=munge.key --socket="$0/munge.socket" --pid-file="$0/munge.pid" \
    --log-file="$0/munge.log" --seed-file="$0/munge.seed"
slurmctld -c
slurmd
for _ in $(seq 100); do sinfo -h -o %T | grep -q idle && break; sleep 0.1; done
cd "$1"
shift
"$@"
"""


ALLOCATED = ("salloc", "-Q", "-n", "2")
SHELL_OF_A_STEP = ("srun", "-Q", "-n", "2", "--pty")
"""All that is allocated is the step's, of which one task runs."""


def in_allocation(
    folder: pathlib.Path, *arguments: str, through: Sequence[str] = ALLOCATED
) -> Result:
    """Runs `tarantella` with two tasks of a new cluster."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "etc_hosts").write_text("127.0.0.1 localhost\n10.98.0.1 node1\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder, max(2, os.cpu_count() or 1)))
    namespaces = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc"]
    inside = [*namespaces, "--kill-child", "sh", "-c", SETUP, str(folder), str(SCRIPTS)]
    command = [*through, sys.executable, "-m", "tarantella_pp", "--mpi", "slurm"]
    with Job(*inside, *command, *arguments, SLURM_CONF=str(configuration)) as job:
        return job.result()


@pytest.mark.parametrize("through", [ALLOCATED, SHELL_OF_A_STEP])
def test_ranks_are_the_tasks_of_the_allocation(tmp_path, through):
    result = in_allocation(tmp_path, "hello.py", "you", through=through)
    assert result.code == 0, result.stderr
    assert "hello 1 2 you\n" in result.stdout


def test_a_task_that_fails_is_named_and_ends_the_job(tmp_path):
    result = in_allocation(tmp_path, "fault.py", "raise", "recv")
    assert result.code == 1
    assert "tarantella: rank 1 of 2 on host node1 failed first: ValueError" in result.stderr
