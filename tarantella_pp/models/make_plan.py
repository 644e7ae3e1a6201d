"""`make_plan`: a plan whose open options are chosen by the simulated time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.graph.profile import Profile
from tarantella_pp.partition.infeasible import infeasible
from tarantella_pp.partition.options import checked_count
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_simulation import HardwareSpec, with_bubble
from tarantella_pp.partition.plan_search import PlanSearch
from tarantella_pp.partition.planner import Planner
from tarantella_pp.runtime.tracing.profiler import profile as measure
from tarantella_pp.schedule import Schedule, ScheduleSpec, read_schedule

CORE = HardwareSpec(flops_per_second=6e10, action_seconds=3e-4, memory_bandwidth=1e10)
"""One core of a CPU, as measured with the models of `benchmarks/`."""
ACCELERATOR = HardwareSpec(flops_per_second=1e13, action_seconds=3e-4, memory_bandwidth=1e12)
"""A GPU."""
MICRO_BATCHES = 8
"""Into how many a batch is cut to measure operations, where that is open."""


def make_plan(
    model: keras.Model | ExtractedModel,
    num_stages: int | None = None,
    *,
    batch_size: int = 32,
    num_micro_batches: int | None = None,
    num_replicas: int | None = None,
    num_ranks: int | None = None,
    stages_per_rank: int | None = None,
    schedule: str | Path | Schedule = "1f1b",
    balance: str = "memory",
    memory_limit: int | float | str | Sequence[int | float | str] | None = None,
    recompute: str | Sequence[int] | None = None,
    optimizer: Any = None,
    profile: Profile | None = None,
    machine: HardwareSpec | None = None,
) -> Plan:
    """Plans the stages of a model's pipeline; needs neither MPI nor data, and trains nothing.

    The plan is the best over all orders in which the operations can run, or comes with a bound
    on how much better one could be. Operations that share statistics or seeds stay on one stage.
    Options that are left open are chosen by the simulated seconds of a step.

    Args:
        model: A Functional or built Sequential model, or what was read of one.
        num_stages: Number of pipeline stages; each gets at least one operation. Default: that of
            a schedule of your own, or with `num_ranks` the number that makes a step fastest.
        batch_size: Samples of a step, over all replicas.
        num_micro_batches: Micro-batches of a step. Default: the number that divides the batch,
            or a power of two where none does, and makes a step fastest: more of them keep the
            pipeline busier, and each costs time of its own. With batch normalization a
            micro-batch keeps four samples.
        num_replicas: Number of pipelines side by side, among which a batch is split. Default: 1,
            or with `num_ranks` what is left for each stage.
        num_ranks: Number of ranks for stages x replicas. Default: one for each stage, or for as
            many as `stages_per_rank` says.
        stages_per_rank: Number of stages of a rank (virtual stages). Default: 2 for
            `"interleaved"` and `"zb-v"`, that of a schedule of your own, otherwise 1.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zb-h1"`, `"zb-v"`, `"zb-auto"`, which is
            planned like `"zb-h1"` and searched for in the first training steps, or a schedule of
            your own: a `tarantella_pp.schedule.Schedule` or the path of a text file with one.
        balance: `"memory"` for the smallest largest memory of a stage, buffers of messages left
            out; `"time"` for the smallest largest time of a stage, measured on this machine;
            `"flops"` for the smallest largest number of floating point operations. Of ranks with
            several stages the largest counts, not the largest stage.
        memory_limit: Largest memory of a stage, in bytes or as in `"16GB"`; for unequal devices
            one for each stage, as in `["16GB", "8GB"]`. Default: none.
        recompute: Activation checkpointing: stages that keep only the inputs of a micro-batch
            and repeat its forward pass in the backward pass: `"all"`, `"none"` or their
            numbers. Default: none, or where the limit needs it those with which a step is fastest.
        optimizer: The optimizer whose state counts as memory: a Keras optimizer or its name.
            Default: two slots for each variable, as Adam has.
        profile: What `tnt.profile` measured of this model. The plan and its simulation use it
            whatever they balance. Default: for `balance="time"`, measured now with random inputs.
        machine: Speed of a rank and of the links, for the simulation. Default: one core of a
            CPU, or a GPU where there is one.

    Returns:
        The plan.

    Raises:
        ConfigurationError: An option cannot work, alone or with this model.
        ScheduleError: There is no such schedule, or it is none for so many stages and ranks.
        UnsupportedModelError: The model cannot be cut into stages.
        PlanError: No plan keeps the limit, or has an operation for each stage. The message names
            the smallest limit that works, and what else would.
    """
    extracted = extract(model)
    custom = read_schedule(schedule)
    per_rank = _stages_per_rank(stages_per_rank, schedule, custom)
    if custom is not None:
        num_stages = custom.num_stages if num_stages is None else num_stages
        if num_micro_batches is None:
            num_micro_batches = custom.num_micro_batches
    shapes = _shapes(num_stages, num_replicas, num_ranks, per_rank)
    if balance == "time" and profile is None:
        parts = (num_micro_batches or MICRO_BATCHES) * shapes[0][1]
        profile = measure(extracted, max(1, checked_count("batch_size", batch_size) // parts))
    planner = Planner.of(extracted, optimizer, profile)
    given = {
        "batch_size": batch_size,
        "num_micro_batches": num_micro_batches,
        "balance": balance,
        "memory_limit": memory_limit,
        "recompute": recompute,
    }
    machine = machine or (ACCELERATOR if tf.config.list_physical_devices("GPU") else CORE)
    choosers = [
        PlanSearch(
            planner,
            machine,
            {**given, "num_stages": stages, "num_replicas": replicas},
            ScheduleSpec.of(custom or schedule, stages, stages // per_rank),
        )
        for stages, replicas in shapes
    ]
    if len(choosers) > 1:
        nodes = len(planner.graph.nodes)
        choosers = [c for c in choosers if c.given["num_stages"] <= nodes]
        choosers = [c for c in choosers if c.given["num_replicas"] <= batch_size]
    found = [timed for timed in map(PlanSearch.best, choosers) if timed is not None]
    if found:
        return with_bubble(min(found, key=lambda timed: timed[0])[1])
    raise PlanError(infeasible(choosers[-1]))


def _stages_per_rank(given: int | None, schedule: Any, custom: Schedule | None) -> int:
    if given is not None:
        return checked_count("stages_per_rank", given)
    if custom is not None:
        return custom.num_stages // custom.num_ranks
    return 2 if schedule in ("interleaved", "zb-v") else 1


def _shapes(
    num_stages: int | None, num_replicas: int | None, num_ranks: int | None, per_rank: int
) -> list[tuple[int, int]]:
    """Returns the pairs of stages and replicas to choose from."""
    given = [("num_stages", num_stages), ("num_replicas", num_replicas)]
    counts = [checked_count(name, value) for name, value in given if value is not None]
    if num_ranks is None:
        stages = checked_count("num_stages", num_stages)
        shapes = [(stages, 1 if num_replicas is None else counts[-1])]
    else:
        ranks = checked_count("num_ranks", num_ranks)
        shapes = [(n * per_rank, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0]
    shapes = [(s, r) for s, r in shapes if num_stages in (None, s) and num_replicas in (None, r)]
    shapes = [(s, r) for s, r in shapes if s % per_rank == 0]
    if not shapes:
        raise ConfigurationError(
            "Ranks are stages x replicas / stages_per_rank. Received: num_ranks="
            f"{num_ranks}, num_stages={num_stages}, num_replicas={num_replicas}, "
            f"stages_per_rank={per_rank}"
        )
    return shapes
