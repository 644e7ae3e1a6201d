"""Two ranks on two hosts with a network between them: a pipeline, and two replicas.

    python benchmarks/training/network.py
    python benchmarks/training/network.py --models cnn --kinds 1f1b zb-auto --wire float32 bfloat16
    python benchmarks/training/network.py --links 10000:0 --progress on off --rounds 3

The hosts are two network namespaces of this machine, each with a name and an address of its own;
MPI may use TCP only. A link is given as `MBIT:MS`, a speed and a delay in each direction. Without a
delay a token bucket (tbf) lets through as many bits a second; with one `relay.py` passes packets
on, up to some 4 Gbit/s. That needs Linux, root, `ip` and `tc` or tun devices. The ranks have one
thread each and are started by `tarantella --hostfile`; both train by `fit`. Replicas have all of
the model on one stage, or on four, so that sums of gradients begin before the backward pass ends.

A launch trains a model in all kinds, with all that floats travel as, one after the other, every
other round in the opposite order. Those with messages that move on while a rank computes, and those
without, are launches of their own. The first training of a kind makes the plan of all. Printed are
the medians of batches; what the plan said before, by costs and a link that it measured; the same
with computations as they were in these batches, for the machine's speed may have changed since
("replayed"); what the schedule would then take if messages took no time, and how long the link is
busy in each direction; and the step over the larger of these two. The title has the link, and a
round trip of 8 bytes by TCP.

A bucket takes whole segments of TCP (64 KiB), as a network card does: a smaller one has this
machine's cores cut them into packets, on which ranks then compute at a third of their speed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import msgspec
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.measured_costs import measured_costs
from benchmarks.sized_models import BUILDERS, ROWS, data_for
from benchmarks.training.against_fit import BatchSeconds
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.runtime.executor import RecordedStep, alike
from tarantella_pp.schedule import simulate

HOSTS = ("tnt-host-0", "tnt-host-1")
ADDRESSES = ("10.99.0.1", "10.99.0.2")
BATCHES, TIMES = 8, 8
ROUND_TRIPS = 200
HEADS = ("step", "planned", "off", "replayed", "off", "computed", "link", "over")
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


CHOSEN = "chosen"
PIPELINE = {"num_stages": 2, "num_micro_batches": 8}
REPLICAS = {"num_replicas": 2, "num_micro_batches": 1}
KINDS = [
    Kind(CHOSEN, PIPELINE),
    Kind("1f1b", {**PIPELINE, "schedule": "1f1b"}),
    Kind("eager-1f1b", {**PIPELINE, "schedule": "eager-1f1b"}),
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


def train(name: str, kind: Kind, wire: str, folder: Path) -> dict[str, Any]:
    """Trains on this rank, and returns the seconds of batches and of the plan."""
    gc.collect()  # models before
    rows = TIMES * ROWS[name]
    x, y = data_for(name, rows * BATCHES)
    narrow = "wire_dtype" if kind.options.get("num_replicas", 1) == 1 else "gradient_dtype"
    options = {**kind.options, "batch_size": rows, "balance": "time"}
    path = folder / f"{name}-{kind.label}-{wire}.json".replace(" ", "-")
    if path.exists():
        options = {"plan": path}
    elif wire != "float32":
        options[narrow] = wire
    tnt.barrier()  # or one finds what another one has written meanwhile
    model = tnt.PipelineModel(BUILDERS[name](), **options)
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = 3
    warm_up = {"epochs": -(-before // BATCHES), "steps_per_epoch": min(before, BATCHES)}
    measured, how = BatchSeconds(), {"batch_size": rows, "verbose": 0}
    timeline = tnt.callbacks.Timeline(steps=BATCHES)
    model.fit(x, y, **how, **warm_up)
    model.fit(x, y, **how, initial_epoch=1, epochs=2, callbacks=[measured, timeline])
    plan = model.plan
    if tnt.is_master_rank() and not path.exists():
        plan.save(path)
    links = sum(plan.sent(cut) for cut in plan.cuts)
    sums = sum(sum(stage.reduced_bytes) for stage in plan.stages)
    crossing = links * plan.num_micro_batches if plan.num_replicas == 1 else sums
    planned, replayed, computation = simulated(plan, alike(timeline.steps))
    return {
        "schedule": plan.schedule,
        "seconds": measured.seconds,
        "plan": planned,
        "replayed": replayed,
        "computation": computation,
        "bytes": crossing,
    }


def simulated(plan: Plan, steps: list[RecordedStep]) -> tuple[float, float, float]:
    """Returns what a step takes as planned, with the computations of steps, and of these alone.

    Args:
        plan: The plan.
        steps: What ranks did.
    """
    seconds = measured_costs(steps).stages
    if plan.num_replicas > 1:
        stages = tuple(
            msgspec.structs.replace(
                stage, forward_seconds=one.forward, backward_seconds=one.seconds("BW")
            )
            for stage, one in zip(plan.stages, seconds, strict=True)
        )
        plans = [plan, msgspec.structs.replace(plan, stages=stages)]
        found = [
            one.point(one.step(), plan.num_replicas).step_seconds
            for one in map(simulation_of, plans)
        ]
        return found[0], found[1], sum(one.forward + one.seconds("BW") for one in seconds)
    planned = simulation_of(plan)
    costs = replace(planned.costs(), stages=seconds)
    free = planned.without_messages().costs()
    costs_alone = replace(costs, links=free.links, default_link=free.default_link)
    replayed, alone = (
        simulate(steps[0].schedule, each).step_seconds for each in (costs, costs_alone)
    )
    return planned.step().step_seconds, replayed, alone


def simulation_of(plan: Plan) -> PlanSimulation:
    """Returns the simulation of a plan on its machine."""
    machine = plan.machine or HardwareSpec()
    return PlanSimulation(plan, machine, plan.schedule, plan.num_micro_batches)


def train_all(args: argparse.Namespace) -> None:
    """Trains in all ways on this rank, and writes down what is found."""
    pairs = [*itertools.product(chosen(args.kinds), args.wire)]
    name, found = args.models[0], {}
    for kind, wire in reversed(pairs) if args.backwards else pairs:
        found[f"{kind.label} {wire}"] = train(name, kind, wire, args.train)
    if tnt.is_master_rank():
        (args.train / "found.json").write_text(json.dumps(found))


def chosen(labels: list[str]) -> list[Kind]:
    """Returns the kinds with these labels."""
    return [kind for kind in KINDS if kind.label in labels]


@dataclass(frozen=True)
class Link:
    """A link between two hosts.

    Attributes:
        mbit: Million bits a second.
        ms: Delay in each direction.
    """

    mbit: float
    ms: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """Reads `MBIT:MS`."""
        mbit, _, ms = text.partition(":")
        return cls(float(mbit), float(ms or 0))

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s, {self.ms:g} ms"


@contextlib.contextmanager
def hosts(link: Link, folder: Path) -> Iterator[None]:
    """Two hosts with a link between them."""
    commands = [f"ip netns add {host}" for host in HOSTS]
    bucket = f"rate {link.mbit:g}mbit burst {max(128, link.mbit / 25):.0f}kb latency 20ms"
    relay = None
    if link.ms:
        command = [sys.executable, str(Path(__file__).with_name("relay.py"))]
        command += [f"{link.mbit}", f"{link.ms}"]
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert relay.stdout is not None
        relay.stdout.readline()
    else:
        commands.append("ip link add tnt-link-0 type veth peer name tnt-link-1")
    for number, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
        own = f"tnt-link-{number}"
        commands += [
            f"ip link set {own} netns {host}",
            f"ip -n {host} address add {address}/24 dev {own}",
            f"ip -n {host} link set {own} up" + (" mtu 65000" if relay else ""),
            f"ip -n {host} link set lo up",
        ]
        if relay is None:
            commands.append(f"tc -n {host} qdisc add dev {own} root tbf {bucket}")
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
        if relay is not None:
            relay.communicate()


def launch(name: str, progress: str, args: argparse.Namespace, folder: Path, number: int) -> Any:
    """Starts both ranks, and returns what they wrote down."""
    environment = {
        **os.environ,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(folder / "remote-shell"),
        "UCX_TLS": "tcp,self",
        "TNT_PROGRESS": "01"[progress == "on"],
    }
    command = [sys.executable, "-m", "tarantella_pp", "-n", "2", "--threads", "1"]
    command += ["--hostfile", str(folder / "hosts"), "-x", "UCX_TLS"]
    command += ["--", __file__, "--models", name, "--train", str(folder)]
    command += ["--kinds", *args.kinds, "--wire", *args.wire]
    command += ["--backwards"] if number % 2 else []
    host = ["ip", "netns", "exec", HOSTS[0], "unshare", "--uts", "sh", "-c"]
    named = 'hostname $0; exec "$@"'
    subprocess.run([*host, named, HOSTS[0], *command], check=True, timeout=600, env=environment)
    return json.loads((folder / "found.json").read_text())


def round_trip() -> float:
    """Returns the seconds of a round trip of 8 bytes between the hosts."""
    first, second = (["ip", "netns", "exec", host, sys.executable, "-c"] for host in HOSTS)
    taken = (
        "import socket; s = socket.create_server(('', 7001)); print('', flush=True)\n"
        f"c, _ = s.accept()\nfor _ in range({ROUND_TRIPS}): c.sendall(c.recv(8))"
    )
    sent = (
        f"import socket, time; s = socket.create_connection(('{ADDRESSES[1]}', 7001))\n"
        "s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); t = time.perf_counter()\n"
        f"for _ in range({ROUND_TRIPS}): s.sendall(bytes(8)); s.recv(8)\n"
        f"print((time.perf_counter() - t) / {ROUND_TRIPS})"
    )
    with subprocess.Popen([*second, taken], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        return float(subprocess.check_output([*first, sent], timeout=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["cnn", "transformer"], choices=BUILDERS)
    labels = [kind.label for kind in KINDS]
    parser.add_argument("--kinds", nargs="+", default=labels, choices=labels)
    parser.add_argument("--wire", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--progress", nargs="+", default=["on"], choices=["on", "off"])
    parser.add_argument(
        "--links", nargs="+", type=Link.parse, default=[Link(1000, 1)], metavar="MBIT:MS"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backwards", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train_all(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the hosts are gone
    for link in args.links:
        with tempfile.TemporaryDirectory() as folder, hosts(link, Path(folder)):
            title = f"Two hosts, {link}, {1e3 * round_trip():.2f} ms there and back; ms of a step"
            table = Table(title=title)
            for head in ("model", "what", "wire", "progress"):
                table.add_column(head)
            for head in HEADS:
                table.add_column(head, justify="right")
            for name in args.models:
                for row in compare(name, link, args, Path(folder)):
                    table.add_row(*row)
        Console(width=130).print(table)


def compare(name: str, link: Link, args: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """Measures all settings in turn; yields table rows."""
    found: dict[Setting, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for progress in args.progress:
            launched = launch(name, progress, args, folder, number)
            for kind, wire in itertools.product(args.kinds, args.wire):
                setting = Setting(kind, wire, progress)
                found.setdefault(setting, []).append(launched[f"{kind} {wire}"])
    for setting, runs in found.items():
        step = statistics.median(second for run in runs for second in run["seconds"])
        plan, replayed, computed = (
            statistics.median(run[key] for run in runs)
            for key in ("plan", "replayed", "computation")
        )
        busy = 8 * runs[0]["bytes"] / (link.mbit * 1e6)
        shown = [f"{1e3 * step:.0f}"]
        for each in (plan, replayed):
            shown += [f"{1e3 * each:.0f}", f"{each / step - 1:+.1%}"]
        shown += [f"{1e3 * each:.0f}" for each in (computed, busy)]
        if setting.kind == CHOSEN:
            setting = setting._replace(kind=f"{CHOSEN}, {runs[0]['schedule']}")
        yield [name, *setting, *shown, f"{step / max(computed, busy):.2f}"]


if __name__ == "__main__":
    main()
