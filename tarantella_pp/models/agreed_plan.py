"""The plan of a `PipelineModel`: made or loaded on one rank, the same on all."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tarantella_pp.errors import ConfigurationError, PlanError, checked_count
from tarantella_pp.models.make_plan import best_plan, default_machine
from tarantella_pp.models.model_validation import needs_one_replica, replicas_of
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.options import PlanOptions, narrow_dtype
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.with_batch import sent_as
from tarantella_pp.runtime.comm.collective import on_one_rank
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.tracing.machine import magnitude, measure_link, memory_of_each_rank
from tarantella_pp.schedule import read_schedule


def agreed_plan(
    extracted: ExtractedModel,
    communicator: Communicator,
    options: PlanOptions,
    plan: Plan | str | Path | None,
) -> Plan:
    """The plan that rank 0 makes or loads, on all ranks, whose models it must fit."""
    made: list[Plan] = []
    memory = None
    if plan is None:
        machine = _with_link(default_machine(), communicator, exact=options.balance == "time")
        options = replace(options, machine=machine)
        if options.memory_limit is None:
            memory = memory_of_each_rank(communicator)

    def make() -> str:
        if plan is not None:
            made.append(_given_plan(extracted, plan, options))
            return made[0].to_json()
        asked = _on_ranks(options, communicator.size, extracted)
        best = best_plan(extracted, asked)
        needed, stages = (0, 1) if memory is None else _largest_rank(best, communicator.size)
        if memory is not None and needed > memory:
            # Recomputing or another cut may fit. The limit is not the user's: it is in no plan.
            try:
                fitting = best_plan(extracted, replace(asked, memory_limit=memory // stages))
                best = msgspec.structs.replace(fitting, memory_limit=None)
            except PlanError as error:
                warnings.warn(
                    f"A rank would need {format_bytes(needed)} for a batch of {best.batch_size} "
                    f"samples, and its share of the memory of this machine is "
                    f"{format_bytes(memory)}. {error}",
                    stacklevel=2,
                )
        made.append(best)
        return best.to_json()

    # Devices and clocks of ranks may differ, and plans with them: one rank decides for all.
    text = on_one_rank(communicator, 0, "make the plan", make, PlanError)
    agreed = made[0] if made else Plan.from_json(text)
    agreed.check(extracted.graph)
    return agreed


def _with_link(machine: HardwareSpec, communicator: Communicator, *, exact: bool) -> HardwareSpec:
    """A machine with the link between ranks as it is, where that is not known without asking."""
    if communicator.size == 1 or not (exact or communicator.several_hosts):
        return machine
    bandwidth, latency = measure_link(communicator)
    # A rough figure does not make the plan depend on how busy the network happens to be.
    if exact:
        return msgspec.structs.replace(machine, bandwidth=bandwidth, latency=latency)
    return msgspec.structs.replace(machine, bandwidth=magnitude(bandwidth))


def _largest_rank(plan: Plan, num_ranks: int) -> tuple[int, int]:
    """Bytes of the rank that needs most, and the largest number of stages of a rank."""
    replicas = replicas_of(plan.num_stages, num_ranks, plan.num_replicas) if num_ranks > 1 else 1
    ranks = num_ranks // replicas
    stages = Counter(plan.schedule_spec(ranks).placement)
    return max(plan.rank_bytes(ranks)), max(stages.values())


def _on_ranks(options: PlanOptions, num_ranks: int, extracted: ExtractedModel) -> PlanOptions:
    """Says in the options how many ranks there are, or what follows from that."""
    custom = None if options.schedule is None else read_schedule(options.schedule)
    stages, replicas = options.implied_stages(custom), options.num_replicas
    options = replace(options, schedule=custom or options.schedule)
    if stages is None and num_ranks == 1:
        stages = 1
    if stages is None:
        if replicas is None and needs_one_replica(extracted):
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


def _given_plan(extracted: ExtractedModel, plan: Any, options: PlanOptions) -> Plan:
    """Reads a given plan; refuses other things, and options that it has decided already."""
    if not isinstance(plan, (Plan, str, Path)):
        raise ConfigurationError(
            f"Expected a Plan or the path of one. Received: plan={plan!r} of type "
            f"{type(plan).__name__}"
        )
    asked = options.given()
    # Plans of the first version did not say what messages are sent as, so that stands beside them.
    narrow = narrow_dtype("wire_dtype", asked.pop("wire_dtype", None))
    for name, value in asked.items():
        raise ConfigurationError(
            f"The plan says how the pipeline is made. Received: plan together with "
            f"{name}={value!r}. Leave one of the two out."
        )
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    return sent_as(loaded, extracted.graph, narrow)
