"""Two ranks on two hosts with a network between them: a pipeline, and two replicas.

    python benchmarks/training/network.py
    python benchmarks/training/network.py --mbit 10000 --models cnn --rounds 3

The hosts are two network namespaces of this machine, each with a name and an address of its own,
and a token bucket (tbf) lets through as many bits a second as are asked for; MPI may use TCP only.
That needs Linux, root, `ip` and `tc`. The ranks have one thread each and are started by
`tarantella --hostfile`; both train by `fit`. Replicas have all of the model on one stage, or on
four, so that sums of gradients begin before the backward pass ends. All kinds are launched in turn
(A B A B ...). Printed are the medians of batches, what the plan said before, by costs and a link
that it measured, and how long the link is busy in each direction.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.training.against_fit import BatchSeconds
from tests.zoo.sized_models import BUILDERS, ROWS, data_for

HOSTS = ("tnt-host-0", "tnt-host-1")
ADDRESSES = ("10.99.0.1", "10.99.0.2")
BATCHES, TIMES = 12, 8
REMOTE_SHELL = """\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in {0[0]}) host={1[0]} ;; *) host={1[1]} ;; esac
shift
exec ip netns exec $host unshare --uts sh -c "hostname $host; $*"
"""


@dataclass(frozen=True)
class Kind:
    """How a model is trained: options of `PipelineModel`."""

    label: str
    options: dict[str, object]


PIPELINE = {"num_stages": 2, "num_micro_batches": 8}
REPLICAS = {"num_replicas": 2, "num_micro_batches": 1}
KINDS = [
    Kind("1f1b", {**PIPELINE, "schedule": "1f1b"}),
    Kind("zb-h1", {**PIPELINE, "schedule": "zb-h1"}),
    Kind("2 replicas", {**REPLICAS, "num_stages": 1}),
    Kind("of 4 stages", {**REPLICAS, "num_stages": 4}),
    Kind("buckets of 1 MiB", {**REPLICAS, "num_stages": 1, "fusion_threshold": "1MiB"}),
]


def train(name: str, kind: Kind, path: Path) -> None:
    """Trains on this rank, and writes down the seconds of batches and of the plan."""
    rows = TIMES * ROWS[name]
    x, y = data_for(name, rows * BATCHES)
    model = tnt.PipelineModel(BUILDERS[name](), batch_size=rows, balance="time", **kind.options)
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    measured = BatchSeconds()
    model.fit(x, y, batch_size=rows, epochs=2, verbose=0, callbacks=[measured])
    if tnt.is_master_rank():
        plan = model.plan
        links = sum(cut.bytes * plan.num_micro_batches for cut in plan.cuts)
        sums = sum(sum(stage.reduced_bytes) for stage in plan.stages)
        crossing = links if plan.num_replicas == 1 else sums
        found = {"seconds": measured.seconds, "plan": plan.step_seconds, "bytes": crossing}
        path.write_text(json.dumps(found))


@contextlib.contextmanager
def hosts(mbit: int, folder: Path) -> Iterator[None]:
    """Two hosts with a network of so many million bits a second between them."""
    commands = [f"ip netns add {host}" for host in HOSTS]
    commands.append("ip link add tnt-link-0 type veth peer name tnt-link-1")
    for number, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
        link = f"tnt-link-{number}"
        commands += [
            f"ip link set {link} netns {host}",
            f"ip -n {host} address add {address}/24 dev {link}",
            f"ip -n {host} link set {link} up",
            f"ip -n {host} link set lo up",
            f"tc -n {host} qdisc add dev {link} root tbf rate {mbit}mbit burst 32kb latency 20ms",
        ]
    shell = folder / "remote-shell"
    shell.write_text(REMOTE_SHELL.format(ADDRESSES, HOSTS))
    shell.chmod(0o700)
    (folder / "hosts").write_text("\n".join(ADDRESSES) + "\n")
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], check=False)


def launch(name: str, kind: Kind, folder: Path) -> dict[str, Any]:
    """Starts both ranks, and returns what they wrote down."""
    path = folder / "found.json"
    environment = {
        **os.environ,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(folder / "remote-shell"),
        "UCX_TLS": "tcp,self",
    }
    command = [sys.executable, "-m", "tarantella_pp", "-n", "2", "--threads", "1"]
    command += ["--hostfile", str(folder / "hosts"), "-x", "UCX_TLS"]
    command += ["--", __file__, "--models", name, "--kinds", kind.label, "--train", str(path)]
    host = ["ip", "netns", "exec", HOSTS[0], "unshare", "--uts", "sh", "-c"]
    named = 'hostname $0; exec "$@"'
    subprocess.run([*host, named, HOSTS[0], *command], check=True, timeout=300, env=environment)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["cnn", "transformer"], choices=BUILDERS)
    labels = [kind.label for kind in KINDS]
    parser.add_argument("--kinds", nargs="+", default=labels, choices=labels)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if kind.label in args.kinds]
    if args.train:
        train(args.models[0], kinds[0], args.train)
        return
    table = Table(title=f"Two hosts, {args.mbit} Mbit/s; ms of a step")
    for head in ("model", "what", "step", "planned", "off", "link"):
        table.add_column(head, justify="left" if head in ("model", "what") else "right")
    with tempfile.TemporaryDirectory() as folder, hosts(args.mbit, Path(folder)):
        for name in args.models:
            for row in compare(name, kinds, args, Path(folder)):
                table.add_row(*row)
    Console(width=100).print(table)


def compare(
    name: str, kinds: list[Kind], args: argparse.Namespace, folder: Path
) -> Iterator[list[str]]:
    """Measures all kinds in turn; yields table rows."""
    found: dict[str, list[dict[str, Any]]] = {kind.label: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            found[kind.label].append(launch(name, kind, folder))
    for label, runs in found.items():
        step = statistics.median(second for run in runs for second in run["seconds"])
        plan = statistics.median(run["plan"] for run in runs)
        link = 8 * runs[0]["bytes"] / (args.mbit * 1e6)
        seconds = (f"{1e3 * each:.0f}" for each in (step, plan))
        yield [name, label, *seconds, f"{plan / step - 1:+.1%}", f"{1e3 * link:.0f}"]


if __name__ == "__main__":
    main()
