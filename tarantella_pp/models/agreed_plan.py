"""The plan of a `PipelineModel`: made or loaded on one rank, the same on all."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tarantella_pp.errors import ConfigurationError, PlanError, checked_count
from tarantella_pp.internals.training import gpu_in_use
from tarantella_pp.models.make_plan import best_plan, default_machine
from tarantella_pp.models.model_validation import needs_whole_batch, replicas_of
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.comm.collective import on_one_rank
from tarantella_pp.runtime.comm.communicator import Communicator, ranks_at_first
from tarantella_pp.runtime.comm.machine import (
    magnitude,
    measure_link,
    memory_in_use,
    memory_of_each_rank,
)
from tarantella_pp.schedule import read_schedule

# Share of the memory that a rank has left that is for tensors. TensorFlow's graphs and the gaps of
# its allocator take some: beside 624 MiB in eight residual blocks of a rank, 205 MiB.
TENSORS = 0.75


def agreed_plan(
    extracted: ExtractedModel,
    communicator: Communicator,
    options: PlanOptions,
    plan: Plan | str | Path | None,
) -> tuple[Plan, ExtractedModel]:
    """The plan that rank 0 makes or loads, on all ranks, and their models, which it must fit."""
    memory = None
    if plan is None:
        machine = default_machine()
        if communicator.several_hosts:
            # A rough figure: plans do not depend on how busy the network happens to be.
            bandwidth = magnitude(measure_link(communicator)[0])
            machine = msgspec.structs.replace(machine, bandwidth=bandwidth)
        options = replace(options, machine=machine)
        if not options.limited:
            gpu = gpu_in_use()
            left = memory_of_each_rank(communicator, gpu) - (0 if gpu else memory_in_use())
            memory = int(TENSORS * left)

    def make() -> str:
        if plan is not None:
            return _given_plan(plan, options).to_json()
        asked = _on_ranks(options, communicator.size, extracted)
        best = best_plan(extracted, asked)
        if memory is not None:
            best = _fitting(best, extracted, asked, communicator.size, memory)
        return best.to_json()

    # Devices and clocks of ranks may differ, and plans with them: one rank decides for all.
    agreed = Plan.from_json(on_one_rank(communicator, 0, "make the plan", make))
    extracted = extracted.planned_by(agreed.fingerprint, agreed.node_names)
    agreed.check(extracted.graph)
    return agreed, extracted


def _fitting(
    best: Plan, extracted: ExtractedModel, asked: PlanOptions, num_ranks: int, memory: int
) -> Plan:
    """The plan if it fits, else one that does, else the plan and a warning."""
    replicas = replicas_of(best.num_stages, num_ranks, best.num_replicas) if num_ranks > 1 else 1
    ranks = num_ranks // replicas
    needed = max(best.rank_bytes(ranks))
    if needed <= memory:
        return best
    stages = max(Counter(best.schedule_spec(ranks).placement).values())  # of a rank
    try:  # recomputing, or another cut
        fitting = best_plan(extracted, replace(asked, memory_limit=memory // stages))
    except PlanError as error:
        warnings.warn(
            f"A rank would need {format_bytes(needed)} for a batch of {best.batch_size} samples, "
            f"its share of the machine's memory has {format_bytes(memory)} for tensors. {error}",
            stacklevel=2,
        )
        return best
    return fitting.limited_to(None)  # which is not the user's


def _on_fewer(options: PlanOptions, num_ranks: int) -> PlanOptions:
    """Leaves stages and replicas open where a job has lost ranks, and these do not fit the rest."""
    asked, stages, replicas = ranks_at_first(), options.num_stages, options.num_replicas
    if asked <= num_ranks or not isinstance(options.balance, str | None):
        return options
    try:
        replicas_of(stages or max(1, num_ranks // (replicas or 1)), num_ranks, replicas)
    except ConfigurationError:
        warnings.warn(
            f"num_stages={stages} and num_replicas={replicas} do not fit the {num_ranks} ranks "
            f"that are left of {asked}: others are chosen.",
            stacklevel=2,
        )
        return replace(options, num_stages=None, num_replicas=None)
    return options


def _on_ranks(options: PlanOptions, num_ranks: int, extracted: ExtractedModel) -> PlanOptions:
    """Says in the options how many ranks there are, or what follows from that."""
    custom = None if options.schedule is None else read_schedule(options.schedule)
    if custom is None:
        options = _on_fewer(options, num_ranks)
    whole = custom is None and bool(needs_whole_batch(extracted))
    if whole and options.num_micro_batches is None:
        options = replace(options, num_micro_batches=1)
    stages, replicas = options.implied_stages(custom), options.num_replicas
    options = replace(options, schedule=custom or options.schedule)
    if stages is None and num_ranks == 1:
        stages = 1
    if stages is None:
        if whole and replicas is None:
            replicas = 1
        if replicas is not None:
            each = max(1, num_ranks // checked_count("num_replicas", replicas))
            replicas = replicas_of(each, num_ranks, replicas)
        return replace(options, num_replicas=replicas, num_ranks=num_ranks)
    replicas = replicas_of(stages, num_ranks, replicas)
    per_rank: int | None = max(1, stages * replicas // num_ranks)
    if num_ranks == 1:  # which plans for the ranks that it stands for
        per_rank = None if custom is not None or stages % 2 == 0 else 1
    return replace(options, num_stages=stages, num_replicas=replicas, stages_per_rank=per_rank)


def _given_plan(plan: Any, options: PlanOptions) -> Plan:
    """Reads a given plan; refuses other things, and options that it has decided already."""
    if not isinstance(plan, (Plan, str, Path)):
        raise ConfigurationError(
            f"Expected a Plan or the path of one. Received: plan={plan!r} of type "
            f"{type(plan).__name__}"
        )
    for name, value in options.given().items():
        raise ConfigurationError(
            f"The plan says how the pipeline is made. Received: plan together with "
            f"{name}={value!r}. Leave one of the two out."
        )
    return plan if isinstance(plan, Plan) else Plan.load(plan)
