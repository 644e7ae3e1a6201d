"""Replicas of a pipeline whose stages sleep: bubble and exposed reductions, measured and simulated.

    tarantella -n 8 --threads 1 -- benchmarks/runtime/sleeping_replicas.py
    ... benchmarks/runtime/sleeping_replicas.py --replicas 4 --megabytes 0 4 16 --schedules 1f1b

Everything but the stages is real: messages, the loop over the actions, sums of gradients. The
simulator is told how long stages sleep, and how long a sum takes that all ranks make at once and
wait for. What it says is exposed of the sums is what they make a step longer although they go on
beside the backward passes of other stages. "Points" are parts of the step, in per cent.
"""

from __future__ import annotations

import argparse
import statistics
import time

from rich.console import Console
from rich.table import Table

from benchmarks.runtime.stubs import Seconds, StubPipeline, StubSums
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.comm.machine import clock_offset
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.executor import RecordedStep, Recorder, gather_steps
from tarantella_pp.schedule import Costs, simulate

HEADS = (
    "schedule", "MiB", "sum ms", "step ms", "simulated", "off",
    "bubble", "points", "exposed ms", "simulated", "points",
)  # fmt: skip


def seconds_of_sum(sums: StubSums, ranks: Communicator, turns: int = 5) -> float:
    """How long a sum takes that all ranks make at once, and wait for."""
    times = []
    for _ in range(turns):
        ranks.barrier()
        start = time.perf_counter()
        sums.start()
        sums.finish()
        times.append(time.perf_counter() - start)
    return max(ranks.allgather_json(statistics.median(times)))


def step_seconds(step: RecordedStep) -> float:
    """From the first computation until the last rank has all sums."""
    return max(end for _, end in step.bounds) - step.origin


def measure(
    name: str, groups: ProcessGroups, megabytes: float, each: Seconds, steps: int
) -> list[str]:
    """Runs some steps of a schedule; returns a table row."""
    stages, micro_batches = groups.pipeline.size, 2 * groups.pipeline.size
    sums = StubSums(groups.peers, int(megabytes * 2**20)) if megabytes else None
    alone = 0.0 if sums is None else seconds_of_sum(sums, groups.world)
    recorder = Recorder(steps)
    pipeline = StubPipeline(
        name, stages, micro_batches, each, groups.pipeline, recorder=recorder, sums=sums
    )
    for _ in range(1 + steps):
        groups.world.barrier()
        pipeline.step()
    recorded = gather_steps(recorder.steps, clock_offset(groups.pipeline), groups.pipeline)
    step = statistics.median(map(step_seconds, recorded))
    computed = statistics.median(one.timeline.pipeline_seconds for one in recorded)
    parts = (each.forward, each.input_gradient, each.weight_gradient)
    costs = Costs.uniform(stages, *parts)
    ideal = simulate(pipeline.schedule, costs).with_reductions([[alone]] * stages)
    bubble = 1 - micro_batches * each.total / computed
    exposed = step - computed
    return [
        name, f"{megabytes:g}", f"{1e3 * alone:.1f}",
        f"{1e3 * step:.1f}", f"{1e3 * ideal.step_seconds:.1f}",
        f"{ideal.step_seconds / step - 1:+.1%}",
        f"{bubble:.1%}", f"{100 * (bubble - ideal.bubble_fraction):+.1f}",
        f"{1e3 * exposed:.1f}", f"{1e3 * ideal.exposed_seconds:.1f}",
        f"{100 * (exposed - ideal.exposed_seconds) / step:+.1f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1"])
    parser.add_argument("--megabytes", nargs="+", type=float, default=[0, 1, 8])
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of F, of B and of W")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    groups = ProcessGroups.of(world(), args.replicas)
    each = Seconds(*[1e-3 * args.milliseconds] * 3)
    shape = f"{args.replicas} replicas of {groups.pipeline.size} stages"
    table = Table(title=f"{shape}, F, B and W sleep {args.milliseconds:g} ms each")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "schedule" else "right", no_wrap=True)
    for name in args.schedules:
        for megabytes in args.megabytes:
            table.add_row(*measure(name, groups, megabytes, each, args.steps))
    if groups.world.rank == groups.world.size - 1:
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
