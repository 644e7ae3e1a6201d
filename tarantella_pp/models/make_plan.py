"""`make_plan`: a plan whose open options are chosen by the simulated time of a step."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import keras
import msgspec
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, PlanError, checked_count
from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.models.profiler import profile as measure
from tarantella_pp.partition.graph.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.graph.optimizer_slots import optimizer_of
from tarantella_pp.partition.graph.units import parse_bytes
from tarantella_pp.partition.node_link import NamedGraph
from tarantella_pp.partition.options import (
    GIVEN,
    PLACEMENTS,
    PlanOptions,
    Recompute,
    assignment_of,
    is_given,
    stages_to_recompute,
)
from tarantella_pp.partition.plan.hardware_spec import CORE, HardwareSpec, machine_of, machines
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan_search import WORTHWHILE, PlanSearch, choose_plan, infeasible
from tarantella_pp.partition.planner import Planner
from tarantella_pp.partition.profile import Profile
from tarantella_pp.runtime.weights.optimizer_probe import looks_at_wholes
from tarantella_pp.schedule import V_SHAPED, Schedule, ScheduleSpec, read_schedule

# A GPU whose name says nothing.
ACCELERATOR = HardwareSpec(flops_per_second=1e13, action_seconds=3e-4, memory_bandwidth=1e12)
# Bytes per second of a link below which messages may be worth more micro-batches in flight.
SLOW_LINK = 2e9
# Into how many a batch is cut to measure operations, where that is open.
MICRO_BATCHES = 8
# Stages from which a rank holds less under `v-half` and `v-min` than under 1F1B.
LEAST_FOLDED = 6

# Stages of a pipeline, replicas, and ranks of a pipeline.
Shape = tuple[int, int, int]


def make_plan(
    model: keras.Model | ExtractedModel | Callable[[], keras.Model],
    num_stages: int | None = None,
    *,
    batch_size: int = 32,
    num_micro_batches: int | None = None,
    num_replicas: int | None = None,
    num_ranks: int | None = None,
    stages_per_rank: int | None = None,
    schedule: str | Path | Schedule | None = None,
    balance: str | Sequence[int] | None = None,
    memory_limit: int | float | str | Sequence[int | float | str] | None = None,
    recompute: Recompute | None = None,
    optimizer: Any = None,
    profile: Profile | None = None,
    machine: HardwareSpec | str | Path | None = None,
    placement: str = PLACEMENTS[0],
    fusion_threshold: int | float | str | None = None,
    shard_optimizer: bool = False,
    gradient_dtype: str | None = None,
    wire_dtype: str | None = None,
) -> Plan:
    """Plans the stages of a model's pipeline; needs neither MPI nor data, and trains nothing.

    The plan is the best over all orders in which the operations can run, or comes with a bound
    on how much better one could be. Operations that share statistics or seeds stay on one stage.
    Options that are left open are chosen by the simulated seconds of a step.

    Args:
        model: A Functional or built Sequential model, or a function without arguments that builds
            one: its weights get no values then, so a model of any size is planned anywhere, as is
            one that was made under `tnt.deferred_init()`.
        num_stages: Number of pipeline stages. Default: see `PipelineModel`, or with `num_ranks`
            the number that makes a step fastest.
        batch_size: Samples of a step, over all replicas.
        num_micro_batches: Micro-batches of a step. Default: the number that divides the batch, or
            a power of two where none does, and makes a step fastest: more of them keep the pipeline
            busier, and each costs time. With batch normalization a micro-batch keeps four samples.
        num_replicas: Number of pipelines side by side, among which a batch is split. Default: 1,
            or with `num_ranks` the ranks that are left for each stage.
        num_ranks: Number of ranks for stages x replicas / `stages_per_rank`, the default.
        stages_per_rank: Number of stages of a rank (virtual stages). Default: 2 for
            `"interleaved"`, `"zb-v"`, `"v-half"` and `"v-min"`, as in a schedule of your own,
            otherwise 1.
        schedule: See `PipelineModel`; `"zb-auto"` is planned like `"zb-h1"`. Default: the faster
            of `"1f1b"` and `"zb-h1"`, or with several stages on a rank of `"1f1b"` and
            `"interleaved"`; `"1f1b"` with `recompute`; over a link below 2 GB/s `"eager-1f1b"`
            where that is faster by 5 %, as it takes more memory; under a `memory_limit`, `"v-half"`
            or `"v-min"` where that is faster by 5 % or nothing else fits, on three ranks or more.
        balance: `"memory"` for the smallest largest memory of a rank, temporaries included;
            `"time"` for the smallest largest time, measured on this machine; `"flops"` for the
            same by the machine's arithmetic and memory traffic, nothing measured. Default: the one
            with which a step is fastest within the limit, `"time"` only with a `profile`. Or
            numbers of layers, one for each stage, a nested model counting as one, as in
            `balance=[526, 551]`: these stages are priced.
        memory_limit: Largest memory of a stage, in bytes or as in `"16GB"`; for unequal devices
            one for each stage, as in `["16GB", "8GB"]`. Default: none.
        recompute: Activation checkpointing; see `PipelineModel`.
        optimizer: The optimizer whose state counts as memory: a Keras optimizer or its name.
            Default: two slots for each variable, as Adam has.
        profile: What `tnt.profile` measured of this model. The plan and its simulation use it
            whatever they balance. Default: for `balance="time"`, measured now with random inputs.
        machine: Speed of a rank, its memory and the links: a `HardwareSpec`, a name in
            `tnt.machines` such as `"v100"`, or a file that `HardwareSpec.save` wrote. Default: one
            core of a CPU, or a GPU where there is one.
        placement: Which ranks are neighbours, usually on one node: `"pipelines-together"` or
            `"replicas-together"`, which sum the gradients of a stage.
        fusion_threshold: Most bytes of gradients that replicas sum at a time, in bytes or as in
            `"32MiB"`. Default: what `TNT_FUSION_THRESHOLD` says, or 32 MiB.
        shard_optimizer: Whether replicas share out the optimizer state (ZeRO-1), by whole weights.
        gradient_dtype: `"bfloat16"` to send gradients of weights rounded. Default: as they are.
        wire_dtype: `"bfloat16"` to send activations and their gradients rounded, likewise.

    Raises:
        ConfigurationError: An option cannot work, alone or with this model.
        ScheduleError: There is no such schedule, or it does not fit these stages and ranks.
        UnsupportedModelError: The model cannot be cut into stages.
        PlanError: No plan keeps the limit, or has an operation for each stage. The message names
            the smallest limit that works, and what needs less.
    """
    return best_plan(
        model,
        PlanOptions(
            num_stages=num_stages, batch_size=batch_size, num_micro_batches=num_micro_batches,
            num_replicas=num_replicas, num_ranks=num_ranks, stages_per_rank=stages_per_rank,
            schedule=schedule, balance=balance, memory_limit=memory_limit, recompute=recompute,
            optimizer=optimizer, profile=profile, machine=machine, placement=placement,
            fusion_threshold=fusion_threshold, shard_optimizer=shard_optimizer,
            gradient_dtype=gradient_dtype, wire_dtype=wire_dtype,
        ),
    )  # fmt: skip


def best_plan(model: Any, options: PlanOptions) -> Plan:
    """Makes the plan that `make_plan` describes; layers are opened only where that helps."""
    extracted = _read(model, with_values=options.balance == "time" and options.profile is None)
    if isinstance(extracted, NamedGraph) or not (levels := _levels(extracted, options)):
        return _plan_of(extracted, options)
    found: Plan | None = None
    refused: list[ConfigurationError | PlanError] = []
    operations = 0
    for reading in _readings(extracted, options, levels):
        if len(reading.graph.nodes) == operations:
            continue
        operations = len(reading.graph.nodes)
        try:
            finer = _plan_of(reading, options)
        except (ConfigurationError, PlanError) as error:
            refused.append(error)
            continue
        if found is None or _is_coarse(found) or _is_better(finer, found, options):
            found = finer
        costs = _stage_costs(found, options)
        if not _is_coarse(found) and max(costs) * found.num_stages <= EVEN * sum(costs):
            return found
    whole = tuple(f"'{name}' {why}" for name, why in extracted.kept_whole.items())
    if found is not None:
        return msgspec.structs.replace(found, kept_whole=whole)
    reasons = f" Layers that stay whole: {'; '.join(whole)}." if whole else ""
    raise type(refused[-1])(f"{refused[-1]}{reasons}")  # of the finest reading


def _readings(
    extracted: ExtractedModel, options: PlanOptions, levels: Sequence[int]
) -> Iterator[ExtractedModel]:
    """The model with ever more layers opened, and cut by columns."""
    yield extracted.at_level(0)
    most = _most_of_a_layer(extracted, options)
    yield from (extracted.at_level(level, most) for level in levels)


# Most that a stage may have beyond its share before layers are opened, and how many times as small
# as a stage's share the parts are that they are opened into.
EVEN, PARTS = 1.1, (2, 8)


def _levels(extracted: ExtractedModel, options: PlanOptions) -> list[int]:
    """How far to open layers, in turn, if at all; see `ExtractedModel.at_level`."""
    fixed = options.profile is not None or is_given(options.balance)
    stages = options.num_stages or options.num_ranks
    # Nothing to balance, or only to be refused
    if fixed or not isinstance(stages, int) or stages < 2:
        return []
    wanted = [math.ceil(math.log2(parts * stages)) for parts in PARTS]
    return [level for level in wanted if level in extracted.levels]


def _most_of_a_layer(extracted: Any, options: PlanOptions) -> tuple[float, float] | None:
    """The share of the operations, and of the weights, with which a layer is cut by columns."""
    model, stages = extracted.model, options.num_stages or options.num_ranks or 1
    known = options.optimizer or (model.optimizer if model.compiled else None)
    weights = [variable for variable in extracted.variables if variable.trainable]
    if options.balance == "time" or (known and looks_at_wholes(optimizer_of(known), weights)):
        return None
    for_memory = options.balance == "memory" or options.limited
    return 1 / stages, 1 / stages if for_memory else math.inf


def _is_coarse(plan: Plan) -> bool:
    """Whether there are too few operations to say that stages could not be more even."""
    return len(plan.assignment) < max(4, 2 * plan.num_stages)


def _is_better(finer: Plan, plan: Plan, options: PlanOptions) -> bool:
    seconds = [each.step_seconds or 0.0 for each in (finer, plan)]
    most = [max(_stage_costs(each, options)) for each in (finer, plan)]
    return most[0] <= (1 - WORTHWHILE) * most[1] and seconds[0] <= (1 + WORTHWHILE) * seconds[1]


def _stage_costs(plan: Plan, options: PlanOptions) -> list[float]:
    by_memory = options.balance == "memory"
    return [float(stage.memory_bytes if by_memory else stage.flops) for stage in plan.stages]


def _plan_of(extracted: ExtractedModel | NamedGraph, options: PlanOptions) -> Plan:
    machine = default_machine() if options.machine is None else machine_of(options.machine)
    custom = None if options.schedule is None else read_schedule(options.schedule)
    options, assignment = _completed(options, extracted, custom)
    per_rank = 2 if options.schedule in ("interleaved", *V_SHAPED) else 1
    if options.stages_per_rank is not None:
        per_rank = checked_count("stages_per_rank", options.stages_per_rank)
    elif custom is not None:
        per_rank = custom.num_stages // custom.num_ranks
    operations = len(extracted.graph.nodes)
    if not (shapes := _shapes(options, per_rank, operations)):
        raise ConfigurationError(
            f"Ranks are stages x replicas / stages_per_rank, of at most {operations} stages, each "
            f"with an operation, and {options.batch_size} replicas, each with a sample. Received: "
            f"num_ranks={options.num_ranks}, num_stages={options.num_stages}, num_replicas="
            f"{options.num_replicas}, stages_per_rank={per_rank}"
        )
    if options.balance == "time" and options.profile is None:
        options = replace(options, profile=_measured(extracted, options, shapes[0][1]))
    planner = Planner.of(extracted, options.optimizer, options.profile, machine, assignment)
    if len(shapes) == 1:
        planner.check_stages(shapes[0][0])
    if len(shapes) > 1:
        shapes = _possible(shapes, planner, options) or shapes[-1:]  # as few replicas as can be
    searches = _searches(planner, options, custom, shapes)
    chosen = choose_plan(searches, lambda best: _further(planner, options, shapes, best))
    if chosen is None:
        raise PlanError(infeasible(replace(searches[-1], roughly=False)))
    return chosen


def _searches(
    planner: Planner, options: PlanOptions, custom: Schedule | None, shapes: list[Shape]
) -> list[PlanSearch]:
    """Searches among plans of some shapes, by the balance that is asked for or by all of them."""
    balances: tuple[Any, ...] = (options.balance,)
    if options.balance is None:  # the last one makes the plan of least memory
        balances = ("flops", "memory") if options.profile is None else ("time", "flops", "memory")
    return [
        PlanSearch(
            planner,
            replace(options, balance=balance, num_stages=stages, num_replicas=replicas),
            ScheduleSpec.of(custom or name, stages, ranks),
            # Plans that compete by their steps need no exact count of temporaries.
            roughly=options.balance is None,
        )
        for stages, replicas, ranks in shapes
        for balance in balances
        for name in _schedules(options, planner, stages, ranks)
    ]


def _further(
    planner: Planner, options: PlanOptions, shapes: list[Shape], best: Plan | None
) -> list[PlanSearch]:
    """Searches among plans of schedules that are only taken if they are worth it."""
    if options.schedule is not None:
        return []
    # Pipelines with a stage on each rank whose messages may take as long as computations.
    bandwidth = math.inf if planner.machine is None else planner.machine.bandwidth or math.inf
    slow = [shape for shape in shapes if bandwidth < SLOW_LINK and shape[0] == shape[2] > 1]
    found = _searches(planner, replace(options, schedule="eager-1f1b"), None, slow)
    if not options.limited or any(planner.loops):
        return found
    rank_limit = None
    if options.num_stages is None and options.stages_per_rank is None:
        shapes = _possible(_shapes(options, 2, len(planner.graph.nodes)), planner, options)
        rank_limit = parse_bytes(cast("int | str", options.memory_limit), "memory_limit")
        options = replace(options, memory_limit=None)
    folded = [shape for shape in shapes if shape[0] == 2 * shape[2] >= LEAST_FOLDED]
    if best is not None:  # the same ranks and micro-batches: to try all takes as long again
        folded = [shape for shape in folded if shape[1:] == (best.num_replicas, best.num_ranks)]
        options = replace(options, num_micro_batches=best.num_micro_batches)
    for name in ("v-half", "v-min"):
        made = _searches(planner, replace(options, schedule=name), None, folded)
        found += [replace(search, rank_limit=rank_limit) for search in made]
    return found


def _completed(
    options: PlanOptions, extracted: ExtractedModel | NamedGraph, custom: Schedule | None
) -> tuple[PlanOptions, tuple[int, ...] | None]:
    """Adds what follows from model, schedule and balance; the stage of each node, if given."""
    assignment = None
    changes: dict[str, Any] = {}
    if isinstance(extracted, NamedGraph) and options.profile is None:
        changes["profile"] = extracted.profile
    if is_given(options.balance):
        balance = cast("Sequence[int]", options.balance)
        assignment = assignment_of(extracted.graph, balance)
        stages = max(assignment) + 1
        if options.num_stages not in (None, stages):
            raise ConfigurationError(
                f"Expected a number of layers for each of {options.num_stages} stages. "
                f"Received: balance={list(balance)}"
            )
        options = replace(options, num_stages=stages, balance=GIVEN)
    if custom is not None and options.num_micro_batches is None:
        changes["num_micro_batches"] = custom.num_micro_batches
    return replace(options, num_stages=options.implied_stages(custom), **changes), assignment


def _measured(
    extracted: ExtractedModel | NamedGraph, options: PlanOptions, num_replicas: int
) -> Profile:
    """Measures a model's operations with micro-batches like the ones that are planned."""
    if isinstance(extracted, NamedGraph):
        raise ConfigurationError(
            f"Graph '{extracted.name}' has no forward_seconds and backward_seconds for its "
            "nodes. Received: balance='time'"
        )
    parts = (options.num_micro_batches or MICRO_BATCHES) * num_replicas
    return measure(extracted, max(1, checked_count("batch_size", options.batch_size) // parts))


def _read(model: Any, *, with_values: bool) -> ExtractedModel | NamedGraph:
    """Reads a model, or one that a function builds, without values where these are not needed."""
    if isinstance(model, NamedGraph):
        return model
    if isinstance(model, keras.Model | ExtractedModel) or not callable(model):
        return extract(model)
    with contextlib.nullcontext() if with_values else only_shapes():
        built = model()
    return extract(built)


def default_machine() -> HardwareSpec:
    """The machine that a step is simulated on where none is given."""
    for device in tf.config.list_physical_devices("GPU"):
        name = tf.config.experimental.get_device_details(device).get("device_name", "")
        words = re.findall(r"\w+", name.lower())  # an "RTX A1000" is no A100
        return next((machines[key] for key in machines if key in words), ACCELERATOR)
    return CORE


def _possible(shapes: list[Shape], planner: Planner, options: PlanOptions) -> list[Shape]:
    """Returns the shapes that model, batch and options allow."""
    most = max(1, options.batch_size // planner.least_rows)
    found = []
    for shape in shapes:
        with contextlib.suppress(ConfigurationError):  # stages that are to recompute must exist
            stages_to_recompute(options.recompute or "none", shape[0])
            found += [shape] if shape[1] <= most else []
    return found


def _schedules(options: PlanOptions, planner: Planner, stages: int, ranks: int) -> Sequence[Any]:
    """Returns the schedules to choose from; the last needs the least memory."""
    if options.schedule is not None:
        return (options.schedule,)
    if stages > ranks > 1:
        return ("interleaved", "1f1b")
    # B before W helps only ranks that wait for B, and what B makes again is there until W.
    if ranks == 1 or options.recompute not in (None, "none") or any(planner.loops):
        return ("1f1b",)
    return ("zb-h1", "1f1b")


def _shapes(options: PlanOptions, per_rank: int, operations: int) -> list[Shape]:
    """Returns the shapes that the ranks, operations and samples allow."""
    num_stages, num_replicas, num_ranks = (
        None if value is None else checked_count(name, value)
        for name in ("num_stages", "num_replicas", "num_ranks")
        for value in [getattr(options, name)]
    )
    if num_ranks is None:
        shapes = [(checked_count("num_stages", num_stages), num_replicas or 1)]
    else:
        batch = checked_count("batch_size", options.batch_size)
        most = min(num_ranks, operations // per_rank)
        counts = range(1, most + 1) if num_stages is None else [max(1, num_stages // per_rank)]
        found = [n for n in counts if num_ranks % n == 0 and num_ranks // n <= batch]
        shapes = [(n * per_rank, num_ranks // n) for n in found]
    return [
        (stages, replicas, stages // per_rank)
        for stages, replicas in shapes
        if num_stages in (None, stages)
        and num_replicas in (None, replicas)
        and stages % per_rank == 0
    ]
