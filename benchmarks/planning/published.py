"""Tables that others have published, beside what the planner and the simulator say.

    python benchmarks/planning/published.py [TABLE ...] [--markdown docs/published.md]

The models are built with shapes alone. With `--markdown` each table is written to its place in the
page, behind a comment such as `<!-- memory -->`.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import keras
import msgspec

import tarantella_pp as tnt
from benchmarks.planning.published_models import amoebanet, resnet101, unet
from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.partition.graph.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.options import GIVEN, PlanOptions, Settings, assignment_of, is_given
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, machines
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.partition.plan.stage_costs import StageCostModel
from tarantella_pp.partition.planner import Planner
from tarantella_pp.schedule import (
    Compute,
    Costs,
    LinkCosts,
    StageCosts,
    StepTimeline,
    lower,
    make_schedule,
    search_schedule,
    simulate,
)

GIB = 2**30
EFFECTIVE = 0.8 * (machines["p40"].memory_bandwidth or 0.0)
"""Bytes per second of a P40's memory that programs reach: 277 GB/s."""

Cells = Sequence[str]


class Memory(NamedTuple):
    """A row of torchgpipe's memory tables: GiB over all devices."""

    build: Callable[[], keras.Model]
    name: str
    samples: int
    balance: tuple[int, ...]
    published: float
    again: bool = True
    optimizer: str = "sgd"


UNETS = (
    Memory(partial(unet, 6, 72), "U-Net (6, 72)", 32, (285,), 20.3, again=False),
    Memory(partial(unet, 11, 128), "U-Net (11, 128)", 32, (505,), 20.5),
    Memory(partial(unet, 24, 128), "U-Net (24, 128)", 32, (526, 551), 43.4),
    Memory(partial(unet, 24, 160), "U-Net (24, 160)", 32, (472, 54, 36, 515), 79.1),
    Memory(
        partial(unet, 48, 160), "U-Net (48, 160)", 32, (800, 140, 62, 36, 36, 36, 36, 987), 154.1
    ),
)  # fmt: skip
AMOEBANETS = tuple(
    Memory(partial(amoebanet, *size), f"AmoebaNet-D {size}", 128, balance, total, True, "rmsprop")
    for size, balance, total in (
        ((18, 416), (24,), 3.57 + 0.91),
        ((18, 544), (16, 8), 6.07 + 3.39),
        ((36, 544), (16, 12, 7, 7), 11.80 + 6.91),
        ((72, 512), (23, 16, 11, 6, 6, 5, 5, 6), 20.62 + 10.83),
    )
)


class Speed(NamedTuple):
    """A row of torchgpipe's speed tables, relative to the first line of its model."""

    batch: int
    micro_batches: int
    balance: tuple[int, ...]
    published: float
    always: bool = False


class Subject(NamedTuple):
    """A model whose speed was published, and the one line that a machine is fitted to."""

    name: str
    build: Callable[[], keras.Model]
    base: Speed
    samples_per_second: float
    rows: tuple[Speed, ...]


_EIGHT = (2, 2, 2, 3, 3, 4, 4, 4)
SUBJECTS = (
    Subject(
        "ResNet-101", resnet101, Speed(118, 1, (370,), 1.0), 95.862,
        (
            Speed(220, 2, (370,), 0.853),
            Speed(25_000, 1667, (135, 235), 1.414),
            Speed(5632, 256, (44, 92, 124, 110), 2.774),
            Speed(5400, 150, (26, 22, 33, 44, 44, 66, 66, 69), 4.294),
        ),
    ),
    Subject(
        "U-Net (5, 64)", partial(unet, 5, 64), Speed(40, 1, (241,), 1.0), 28.5,
        (
            Speed(80, 2, (241,), 0.858),
            Speed(512, 32, (104, 137), 1.246),
            Speed(512, 16, (30, 66, 84, 61), 2.352),
            Speed(640, 40, (16, 27, 31, 44, 22, 57, 27, 17), 3.105),
        ),
    ),
    Subject(
        "AmoebaNet-D (18, 256)", partial(amoebanet, 18, 256),
        Speed(96, 1, (7, 17), 1.0, always=True), 26.733,
        (
            Speed(96, 1, (7, 17), 1.0, always=True),
            Speed(256, 4, (9, 15), 1.539),
            Speed(1280, 32, (9, 15), 1.773),
            Speed(160, 1, (3, 4, 5, 12), 1.004, always=True),
            Speed(360, 4, (3, 6, 7, 8), 1.666),
            Speed(1152, 32, (3, 6, 7, 8), 2.709),
            Speed(196, 1, (2, 2, 2, 2, 2, 3, 4, 7), 0.932, always=True),
            Speed(480, 4, _EIGHT, 2.621),
            Speed(1280, 32, _EIGHT, 4.953),
        ),
    ),
)  # fmt: skip


class Bubble(NamedTuple):
    """A row of the zero-bubble paper's table 5: ms of F, B, W and a message, and rates."""

    model: str
    ranks: int
    micro_batches: int
    forward: float
    input_gradient: float
    weight_gradient: float
    message: float
    one_f_one_b: float
    interleaved: float
    zb_h1: float


BUBBLES = (
    Bubble("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585),
    Bubble("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242),
    Bubble("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674),
    Bubble("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397),
    Bubble("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088),
    Bubble("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576),
)
LAYERS = 3
"""Transformer layers of a stage, which are its virtual stages where they are interleaved."""


@cache
def read(build: Callable[[], keras.Model]) -> ExtractedModel:
    """Reads a model once."""
    with only_shapes():
        model = build()
    return extract(model)


def counted(plan: tnt.Plan) -> str:
    """Writes the stages of a plan as numbers of layers, as torchgpipe does."""
    places = [int(name[1:].partition("_")[0]) for name in plan.node_names]
    last = [
        max(p for p, s in zip(places, plan.assignment, strict=True) if s == stage)
        for stage in range(plan.num_stages)
    ]
    ends = [-1, *last]
    return ",".join(str(end - begin) for begin, end in itertools.pairwise(ends))


def planned(
    planner: Planner, stages: int, batch: int, count: int, balance: Any, again: str = "none"
) -> tnt.Plan:
    """Plans for gpipe, with the best stages or numbers of layers that are given."""
    if is_given(balance):
        planner = replace(planner, assignment=assignment_of(planner.graph, balance))
        balance = GIVEN
    options = PlanOptions(
        num_stages=stages, batch_size=batch, num_micro_batches=count, num_replicas=1,
        schedule="gpipe", balance=balance, memory_limit=None, recompute=again,
    ).settled()  # fmt: skip
    return planner.write(planner.solve(options), options)


class Unbounded(Planner):
    """Plans for torchgpipe, whose stages run ahead of the next ones by as much as they can."""

    def costs(self, options: Settings) -> StageCostModel:
        """Describes stages whose messages wait for the next one, all of a step if need be."""
        # The window is one of gpipe alone; all else is the same for any schedule.
        return super().costs(msgspec.structs.replace(options, schedule="1f1b"))


def planned_memory(row: Memory, balance: Any, kind: type[Planner] = Planner) -> tnt.Plan:
    """Plans a row as torchgpipe trained it: gpipe, micro-batches of one sample."""
    count, again = (row.samples, "all") if row.again else (1, "none")
    planner = kind.of(read(row.build), row.optimizer, machine=machines["p40"])
    return planned(planner, len(row.balance), row.samples, count, balance, again)


def memory_rows(table: Iterable[Memory]) -> Iterator[Cells]:
    """Yields torchgpipe's balances in our bytes."""
    yield "model", "stages", "published", "planned", "error", "ours"
    for row in table:
        theirs, ours = (planned_memory(row, row.balance, kind) for kind in (Unbounded, Planner))
        total, bounded = (sum(s.memory_bytes for s in p.stages) / GIB for p in (theirs, ours))
        yield (
            row.name, str(len(row.balance)), f"{row.published:.2f}",
            f"{total:.2f}", f"{total / row.published - 1:+.1%}", f"{bounded:.2f}",
        )  # fmt: skip


def balance_rows(table: Iterable[Memory]) -> Iterator[Cells]:
    """Yields the largest stage of torchgpipe's balances and of ours."""
    yield "model", "their balance", "largest", "our balance", "largest", "gap"
    for row in table:
        if len(row.balance) == 1:
            continue
        theirs = planned_memory(row, row.balance)
        ours = planned_memory(row, "memory")
        proof = ours.certificate
        largest = [max(s.memory_bytes for s in plan.stages) / GIB for plan in (theirs, ours)]
        yield (
            row.name, ",".join(map(str, row.balance)), f"{largest[0]:.2f}", counted(ours),
            f"{largest[1]:.2f}",
            "optimal" if proof.optimal else f"{100 * (proof.gap or 0):.2g} %",
        )  # fmt: skip


@cache
def planned_speed(
    build: Callable[[], keras.Model], row: Speed, machine: HardwareSpec | None
) -> tnt.Plan:
    """Plans a row with the best stages for a machine; without one, with its own stages."""
    planner = Planner.of(read(build), "sgd", machine=machine)
    balance = "flops" if machine else row.balance
    return planned(planner, len(row.balance), row.batch, row.micro_batches, balance)


@dataclass(frozen=True)
class Track:
    """A machine that a model is trained on as torchgpipe does, and how fast."""

    build: Callable[[], keras.Model]
    machine: HardwareSpec

    def rate(self, row: Speed, *, ours: bool = False) -> float:
        """Returns simulated samples per second of a row, with its balance or ours."""
        stages, count = len(row.balance), row.micro_batches
        plan = planned_speed(self.build, row, self.machine if ours else None)
        costs = PlanSimulation(plan, self.machine, "gpipe", count).costs()
        repeated = count if row.always else count - 1  # the last one is not
        before = {
            Compute(stage, "BW", i): cost.forward
            for stage, cost in enumerate(costs.stages)
            for i in range(repeated)
        }
        schedule = lower(make_schedule("gpipe", stages, count), plan.links, plan.gradient_links)
        return row.batch / simulate(schedule, replace(costs, before=before)).step_seconds


def fitted(subject: Subject, memory: float | None) -> Track:
    """Finds the speed of arithmetic with which the first line is what was published."""
    low, high = 1e11, 1e14
    for _ in range(30):
        machine = HardwareSpec((low * high) ** 0.5, 12e9, 1e-5, memory_bandwidth=memory)
        fast = Track(subject.build, machine).rate(subject.base) > subject.samples_per_second
        low, high = (low, machine.flops_per_second) if fast else (machine.flops_per_second, high)
    return Track(subject.build, machine)


def speed_rows(subjects: Iterable[Subject] = SUBJECTS) -> Iterator[Cells]:
    """Yields torchgpipe's speed-ups and ours by roofline."""
    yield "model", "stages x m", "published", "planned", "error", "ours over theirs"
    errors: list[float] = []
    for subject in subjects:
        track = fitted(subject, EFFECTIVE)
        for row in subject.rows:
            found = track.rate(row) / subject.samples_per_second
            ours = track.rate(row, ours=True) / subject.samples_per_second
            errors.append(abs(found / row.published - 1))
            yield (
                subject.name, f"{len(row.balance)} x {row.micro_batches:,}",
                f"{row.published:.3f}", f"{found:.3f}", f"{found / row.published - 1:+.1%}",
                f"{ours / found - 1:+.1%}",
            )  # fmt: skip
    yield "median error", "", "", "", f"{statistics.median(errors):.1%}", ""


def rate_of(timeline: StepTimeline, busy: float) -> float:
    """Returns the paper's rate: how much of the longest rank, first to last action, is idle."""
    longest = 0.0
    for own in timeline.events:
        computed = [event for event in own if isinstance(event.action, Compute)]
        longest = max(longest, computed[-1].end - computed[0].start)
    return 1 - busy / longest


def bubble_rows() -> Iterator[Cells]:
    """Yields table 5 and what the simulator says, with `zb-auto` in twice the memory of 1F1B."""
    yield (
        *("model", "ranks", "micro-batches", "1F1B", "ours", "ZB-H1", "ours"),
        *("interleaved", "ours", "zb-auto"),
    )
    for row in BUBBLES:
        times = (row.forward, row.input_gradient, row.weight_gradient)
        busy = row.micro_batches * sum(times)
        link = LinkCosts(latency=row.message)
        found = {}
        for name, stages in (("1f1b", 1), ("zb-h1", 1), ("interleaved", LAYERS)):
            costs = Costs.uniform(
                row.ranks * stages, *(seconds / stages for seconds in times), link=link
            )
            placement = [stage % row.ranks for stage in range(row.ranks * stages)]
            schedule = make_schedule(name, len(placement), row.micro_batches, placement=placement)
            found[name] = rate_of(simulate(lower(schedule), costs), busy)
        costs = Costs((StageCosts(*times),) * row.ranks, default_link=link)
        best = search_schedule(
            row.ranks, row.micro_batches, costs=costs, in_flight_limit=2 * row.ranks
        )
        yield (
            row.model, str(row.ranks), str(row.micro_batches),
            f"{row.one_f_one_b:.4f}", f"{found['1f1b']:.4f}", f"{row.zb_h1:.4f}",
            f"{found['zb-h1']:.4f}", f"{row.interleaved:.4f}", f"{found['interleaved']:.4f}",
            f"{simulate(lower(best), costs).bubble_fraction:.4f}",
        )  # fmt: skip


TABLES: dict[str, Callable[[], Iterator[Cells]]] = {
    "memory": lambda: memory_rows((*UNETS, *AMOEBANETS)),
    "balance": lambda: balance_rows(UNETS),
    "speed": speed_rows,
    "bubble": bubble_rows,
}


def markdown(rows: Iterable[Cells]) -> str:
    """Writes a table."""
    head, *others = [f"| {' | '.join(cells)} |\n" for cells in rows]
    rule = re.sub(r"[^|\n]+", " --- ", head)
    return "".join([head, rule, *others])


def main() -> None:
    """Prints tables, and writes them to a page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], metavar="TABLE")
    parser.add_argument("--markdown", type=Path, help="put the tables into this page as well")
    arguments = parser.parse_args()
    for name in arguments.tables or TABLES:
        text = markdown(TABLES[name]())
        print(f"{name}\n\n{text}", flush=True)
        if arguments.markdown is not None:
            page = arguments.markdown.read_text(encoding="utf-8")
            place = rf"(<!-- {name} -->\n)(?:\n|\|.*\n)*"
            page = re.sub(place, lambda found, text=text: f"{found[1]}\n{text}\n", page)
            arguments.markdown.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
