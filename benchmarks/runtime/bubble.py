"""The runtime with stages that sleep instead of computing: its bubble against the closed form.

    tarantella -n 4 -- benchmarks/runtime/bubble.py
    tarantella -n 8 -- benchmarks/runtime/bubble.py --milliseconds 20 --micro-batches 16

Everything but the stages is real, and sleeping stages take no core from each other, so 8 ranks
run on two cores. F, B and W take equally long. All that is not a sleep of the wanted length is
counted as bubble: messages, waking up, Python. The last columns are the step time by simulation
with the measured median times, and how far it is off.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.measured_costs import simulated
from benchmarks.runtime.stubs import Seconds, StubPipeline
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.comm.machine import clock_offset
from tarantella_pp.runtime.executor import Recorder, gather_steps
from tarantella_pp.schedule import TRAINING_NAMES, V_SHAPED, Costs, simulate
from tests.helpers.closed_forms import bubble_fraction

STAGES_PER_RANK = dict.fromkeys(("interleaved", *V_SHAPED), 2)


def measure(name: str, micro_batches: int, seconds: float, steps: int) -> list[str]:
    """Runs some steps of a schedule; returns a table row."""
    ranks = world()
    depth = STAGES_PER_RANK.get(name, 1)
    each = Seconds(seconds, seconds, seconds)
    recorder = Recorder(steps)
    pipeline = StubPipeline(name, depth * ranks.size, micro_batches, each, ranks, recorder=recorder)
    for _ in range(1 + steps):
        ranks.barrier()
        pipeline.step()
    measured = gather_steps(recorder.steps, clock_offset(ranks), ranks)
    times = [one.timeline.step_seconds for one in measured]
    step, best = statistics.median(times), min(times)
    work = micro_batches * depth * (each.total if pipeline.schedule.has_backward else each.forward)
    parts = (each.forward, each.input_gradient, each.weight_gradient)
    ideal = simulate(pipeline.schedule, Costs.uniform(depth * ranks.size, *parts))
    try:
        depth_known = 1 if name == "zb-v" else depth
        form = bubble_fraction(name, ranks.size, micro_batches, depth_known)
    except KeyError:  # a searched schedule has no formula
        form = ideal.bubble_fraction
    bubble = 1 - work / step
    predicted = simulated(measured).step_seconds
    return [
        name, str(ranks.size), str(micro_batches), f"{1e3 * ideal.step_seconds:.0f}",
        f"{1e3 * step:.1f}", f"{bubble:.1%}", f"{form:.1%}", f"{100 * (bubble - form):+.1f}",
        f"{100 * (1 - work / best - form):+.1f}",
        f"{1e3 * predicted:.1f}", f"{predicted / step - 1:+.1%}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=[*TRAINING_NAMES, "forward"])
    parser.add_argument("--micro-batches", type=int, help="default: twice the ranks")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of F, of B and of W")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    ranks = world()
    table = Table(title=f"F, B and W sleep {args.milliseconds:g} ms each; medians of {args.steps}")
    heads = (
        "schedule", "ranks", "m", "ideal ms", "step ms", "bubble", "formula", "points",
        "at best", "simulated ms", "off",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head == "schedule" else "right", no_wrap=True)
    for name in args.schedules:
        micro_batches = args.micro_batches or 2 * ranks.size
        table.add_row(*measure(name, micro_batches, 1e-3 * args.milliseconds, args.steps))
    if ranks.rank == ranks.size - 1:
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
