"""Two ranks on two hosts with a network between them: a pipeline, and two replicas.

    python benchmarks/training/network.py
    python benchmarks/training/network.py --mbit 10000 --ms 0.1 --models cnn --rounds 3
    python benchmarks/training/network.py --progress on off --wire float32 bfloat16

The hosts are two network namespaces of this machine, each with a name and an address of its own,
and a token bucket (tbf) lets through as many bits a second as are asked for; MPI may use TCP only.
That needs Linux, root, `ip` and `tc`, and for a delay of the network (`--ms`) a kernel that has
netem. The ranks have one thread each and are started by
`tarantella --hostfile`; both train by `fit`. Replicas have all of the model on one stage, or on
four, so that sums of gradients begin before the backward pass ends. All that is compared is
launched in turn (A B A B ...): kinds, what floats travel as, and whether messages move on while a
rank computes; the first launch of a kind makes the plan of all. Printed are the medians of batches;
what the plan said before, by costs and a link that it measured; what the schedule would take if
messages took no time, and how long the link is busy in each direction; and the step over the larger
of these two.

A bucket takes whole segments of TCP (64 KiB), as a network card does: a smaller one has this
machine's cores cut them into packets, on which ranks then compute at a third of their speed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.training.against_fit import BatchSeconds
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.runtime.comm.wire_format import numpy_dtype
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
    Kind("zb-auto", {**PIPELINE, "schedule": "zb-auto"}),
    Kind("2 replicas", {**REPLICAS, "num_stages": 1}),
    Kind("of 4 stages", {**REPLICAS, "num_stages": 4}),
    Kind("buckets of 1 MiB", {**REPLICAS, "num_stages": 1, "fusion_threshold": "1MiB"}),
]


class Setting(NamedTuple):
    """What is launched with a model.

    Attributes:
        kind: Label of the kind.
        wire: Dtype in which floats travel.
        progress: Whether messages move on while a rank computes: `"on"` or `"off"`.
    """

    kind: str
    wire: str
    progress: str


def train(name: str, kind: Kind, wire: str, path: Path) -> None:
    """Trains on this rank, and writes down the seconds of batches and of the plan."""
    rows = TIMES * ROWS[name]
    x, y = data_for(name, rows * BATCHES)
    narrow = "wire_dtype" if kind.options.get("num_replicas", 1) == 1 else "gradient_dtype"
    options = {**kind.options, "batch_size": rows, "balance": "time"}
    plan = path.with_name(f"{name}-{kind.label}-{wire}.json".replace(" ", "-"))
    if plan.exists():
        options = {"plan": plan}
    if wire != "float32" and (narrow == "wire_dtype" or not plan.exists()):
        options[narrow] = wire
    model = tnt.PipelineModel(BUILDERS[name](), **options)
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    measured = BatchSeconds()
    model.fit(x, y, batch_size=rows, epochs=2, verbose=0, callbacks=[measured])
    if tnt.is_master_rank():
        if not plan.exists():
            model.plan.save(plan)
        plan = model.plan
        links = sum(cut.bytes * plan.num_micro_batches for cut in plan.cuts)
        sums = sum(sum(stage.reduced_bytes) for stage in plan.stages)
        crossing = (links if plan.num_replicas == 1 else sums) * numpy_dtype(wire).itemsize / 4
        simulated = PlanSimulation(plan, plan.machine, plan.schedule, plan.num_micro_batches)
        found = {
            "seconds": measured.seconds,
            "plan": plan.step_seconds,
            "computation": simulated.without_messages().step().step_seconds,
            "bytes": crossing,
        }
        path.write_text(json.dumps(found))


@contextlib.contextmanager
def hosts(mbit: int, delay: float, folder: Path) -> Iterator[None]:
    """Two hosts with a network of so many million bits a second, and ms of delay, between them."""
    commands = [f"ip netns add {host}" for host in HOSTS]
    bucket = f"rate {mbit}mbit burst {max(128, mbit // 25)}kb latency 20ms"
    commands.append("ip link add tnt-link-0 type veth peer name tnt-link-1")
    for number, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
        link = f"tnt-link-{number}"
        commands += [
            f"ip link set {link} netns {host}",
            f"ip -n {host} address add {address}/24 dev {link}",
            f"ip -n {host} link set {link} up",
            f"ip -n {host} link set lo up",
            f"tc -n {host} qdisc add dev {link} root handle 1: tbf {bucket}",
        ]
        if delay:
            commands.append(
                f"tc -n {host} qdisc add dev {link} parent 1: netem delay {delay}ms limit 100000"
            )
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


def launch(name: str, setting: Setting, folder: Path) -> dict[str, Any]:
    """Starts both ranks, and returns what they wrote down."""
    path = folder / "found.json"
    environment = {
        **os.environ,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(folder / "remote-shell"),
        "UCX_TLS": "tcp,self",
        "TNT_PROGRESS": "01"[setting.progress == "on"],
    }
    command = [sys.executable, "-m", "tarantella_pp", "-n", "2", "--threads", "1"]
    command += ["--hostfile", str(folder / "hosts"), "-x", "UCX_TLS"]
    command += ["--", __file__, "--models", name, "--kinds", setting.kind, "--wire", setting.wire]
    command += ["--train", str(path)]
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
    parser.add_argument("--wire", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--progress", nargs="+", default=["on"], choices=["on", "off"])
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument(
        "--ms", type=float, default=0.0, help="delay in each direction; needs netem"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if kind.label in args.kinds]
    if args.train:
        train(args.models[0], kinds[0], args.wire[0], args.train)
        return
    table = Table(title=f"Two hosts, {args.mbit} Mbit/s, {args.ms:g} ms; ms of a step")
    for head in ("model", "what", "wire", "progress"):
        table.add_column(head)
    for head in ("step", "planned", "off", "computed", "link", "over the larger"):
        table.add_column(head, justify="right")
    with tempfile.TemporaryDirectory() as folder, hosts(args.mbit, args.ms, Path(folder)):
        for name in args.models:
            for row in compare(name, args, Path(folder)):
                table.add_row(*row)
    Console(width=100).print(table)


def compare(name: str, args: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """Measures all settings in turn; yields table rows."""
    settings = [*map(Setting._make, itertools.product(args.kinds, args.wire, args.progress))]
    found: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in settings}
    for _ in range(args.rounds):
        for setting in settings:
            found[setting].append(launch(name, setting, folder))
    for setting, runs in found.items():
        step = statistics.median(second for run in runs for second in run["seconds"])
        plan, computed = (
            statistics.median(run[key] for run in runs) for key in ("plan", "computation")
        )
        link = 8 * runs[0]["bytes"] / (args.mbit * 1e6)
        planned, times = f"{plan / step - 1:+.1%}", (step, plan, computed, link)
        shown = [f"{1e3 * each:.0f}" for each in times]
        shown.insert(2, planned)
        yield [name, *setting, *shown, f"{step / max(computed, link):.2f}"]


if __name__ == "__main__":
    main()
