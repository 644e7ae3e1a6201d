"""The partition problem of a layer graph, and its best solution in real memory."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.costs.least_memory import LeastMemory, StageSums, least_memory
from tarantella_pp.partition.costs.stage_costs import StageCostModel
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.graph.units import wire_bytes
from tarantella_pp.partition.options import Settings
from tarantella_pp.partition.rank_balancing import (
    balance_ranks,
    lower_bound,
    rank_totals,
)
from tarantella_pp.partition.recomputation import recomputing
from tarantella_pp.partition.solvers.problem.certificate import (
    TOLERANCE,
    Certificate,
    Solution,
)
from tarantella_pp.partition.solvers.problem.problem import (
    FloatArray,
    Objective,
    Problem,
    TensorCost,
    Tied,
)
from tarantella_pp.partition.solvers.solve import solve

OBJECTIVES: dict[str, Objective] = {"memory": "memory", "time": "time", "flops": "flops"}
"""What solvers make small for each way to balance."""
MOST_ATTEMPTS = 6
"""How often less memory is allowed, where messages and what is there for a moment come on top."""
SECONDS = 15.0
"""How long a processor searches a problem, at most, whose best plan cannot be told by listing."""
CLOSE = 1e-3
"""Relative distance from the bound at which that search ends before."""
ALIKE = 0.02
"""Share by which measured seconds of stages differ that count as equal: nobody measures them more
exactly, and a tensor more that crosses a network costs more than that."""
Limits = Sequence[float]
"""Largest memory of each stage in bytes."""


# From a layer graph to a problem, for stages 0 | 1 and a skip whose tensor x three nodes keep:
#
#     graph      (a) --x--> (b) ----> (c) ----> (d)      b, c and d need x again in B and W:
#                  \_________x________/_________/        keepers of x = [b, c, d]
#
#     problem    activation_memory[b] += bytes(x)        the first that keeps it pays for it,
#                TensorCost(b, (b, c, d),                and each later stage that has another:
#                           receive_bytes=bytes(x))         b | c d   both hold x
#                TensorCost(a, (a, b, c, d),                b c d |   one holds x
#                           bytes=x and its gradient)    what is sent, which breaks ties
#
#     memory of a stage = static + in_flight x (activations + received), see `Problem`
#
# That is exact where the nodes lie in a row. On parallel branches a stage that comes before that of
# b may keep x, too: then the problem's memory is a lower bound. With `cautious` a pays in place of
# b, or all three where x is an input of the model: an upper bound. A variable counts like x: its
# first node's stage trains it, each later stage with another has a copy of it and its gradient.


def problem_of(
    costs: StageCostModel,
    options: Settings,
    limit: Limits | None = None,
    *,
    cautious: bool = False,
) -> Problem:
    """Puts the costs of a layer graph into the numbers that solvers work on.

    A stage that recomputes counts as if it held only as many micro-batches as run backward at a
    time, which is a lower bound as well; `recomputing` gives another one.
    """
    activations, kept = _activations(costs, cautious)
    sharing = _sharing(costs)
    return Problem(
        num_stages=options.num_stages,
        objective=OBJECTIVES[options.balance],
        work=_work(costs, options, max if cautious else min),
        static_memory=_state(costs),
        activation_memory=activations,
        tensors=(*kept, *_messages(costs)),
        edges=np.array(sorted(costs.graph.digraph.edges), dtype=np.int64).reshape(-1, 2),
        in_flight=[options.repeats.get(s, held) for s, held in enumerate(options.in_flight)],
        groups=tuple(nodes for nodes, _, _ in sharing),
        tied=tuple(tied for _, tied, _ in sharing),
        group_bytes=tuple(size for _, _, size in sharing),
        memory_limit=limit,
        exactly=True,
        alike=_alike(options),
    )


def _alike(options: Settings) -> float:
    """How far values may be apart and count as equal."""
    return ALIKE if options.balance == "time" else TOLERANCE / 4


def _state(costs: StageCostModel) -> FloatArray:
    """Bytes of variables, gradients and optimizer state, each for the first node that uses it."""
    state, summed = np.zeros(len(costs.graph.nodes)), costs.reduction_bytes()
    counted: set[int] = set()
    for node in costs.graph.nodes:
        own = [w for w in node.weights if w not in counted]
        state[node.id] = sum(costs.state_bytes(w) + summed[w] for w in own)
        counted.update(node.weights)
    return state


def _activations(costs: StageCostModel, cautious: bool) -> tuple[FloatArray, list[TensorCost]]:
    """Bytes that each node keeps of a micro-batch, and what later stages keep again."""
    graph, rows = costs.graph, costs.micro_batch_size
    activations = np.array([rows * node.residual_bytes for node in graph.nodes])
    shared = []
    for tensor, nodes in costs.keepers().items():
        size = rows * graph.tensors[tensor].bytes_per_sample
        producer = graph.tensors[tensor].producer
        if cautious and len(nodes) > 1:
            if producer is None:
                activations[nodes] += size
                continue
            nodes = [producer, *(node for node in nodes if node != producer)]
        activations[nodes[0]] += size
        if len(nodes) > 1:
            shared.append(TensorCost(nodes[0], tuple(nodes), receive_bytes=size))
    return activations, shared


def _messages(costs: StageCostModel) -> Iterator[TensorCost]:
    """What is sent if its nodes part: activations, masks and gradients of a micro-batch."""
    for tensor in costs.graph.tensors:
        if tensor.producer is not None and tensor.consumers:
            sent = wire_bytes(tensor.bytes_per_sample, tensor.dtype, costs.wire_dtype)
            size = costs.micro_batch_size * sent * (1 + tensor.has_gradient)
            nodes = (tensor.producer, *tensor.consumers)
            yield TensorCost(tensor.producer, nodes, bytes=size + costs.mask_bytes(tensor))


def _sharing(costs: StageCostModel) -> list[tuple[tuple[int, ...], Tied, float]]:
    """Nodes that share variables, whether they may part, and the bytes of a copy then."""
    ties, groups = costs.graph.ties, costs.graph.groups
    free: list[tuple[tuple[int, ...], Tied, float]] = [
        (nodes, "free", float(sum(map(costs.copy_bytes, weights))))
        for nodes, weights in ties.items()
    ]
    return free + [(tuple(sorted(group)), "together", 0.0) for group in groups]


def _work(
    costs: StageCostModel, options: Settings, of_all: Callable[[Sequence[float]], float]
) -> FloatArray:
    """FLOPs or seconds of each node, repeated as often as on the stage with the least or most."""
    if options.balance != "time" or costs.seconds is None:
        return costs.flops()
    forwards = 1 + of_all(options.repeated)
    return np.array([forwards * forward + backward for forward, backward in costs.seconds])


def best_solution(
    costs: StageCostModel, options: Settings, *, whole: bool = True, budget: float = SECONDS
) -> Solution:
    """Solves the problem of a layer graph."""
    best: Solution | None = None
    value, bound, seconds = math.inf, 0.0, 0.0
    for one in _formulations(costs, options):
        if best is not None and one.is_last_resort:
            break
        near = None if best is None else best.assignment
        solution, lowest, spent = _within_limit(costs, options, one, budget, near)
        bound, seconds = max(bound, lowest if one.bounds else 0.0), seconds + spent
        if solution is not None:
            found = _value(costs, options, solution)
            if best is None or found < value:
                best, value = solution, found
            # What counts all that is real is not searched again in another way.
            proven = solution.certificate.optimal
            least, slack = (bound, TOLERANCE) if proven else (solution.certificate.value, CLOSE)
            if value <= least * (1 + max(slack, _alike(options))):
                break
    if best is None:
        best = _within_limits(costs, options)
    if whole and options.weighs_stages:
        return _priced_whole(costs, options, best, bound, seconds)
    method, value = best.certificate.method, _value(costs, options, best)
    if options.balance == "memory":
        method += " of state and activations"
    if options.ranks:
        problem = problem_of(costs, options, options.limits)
        best = _over_ranks(costs, options, problem, best)
        bound = max(bound, lower_bound(problem, options.ranks))
        value, method = _value(costs, options, best), f"{method}, then over ranks"
    elif value > bound * (1 + max(TOLERANCE, _alike(options))):
        method += ", parts of the memory bounded"
    return Solution(best.assignment, Certificate.of(value, bound, method, seconds))


def _priced_whole(
    costs: StageCostModel, options: Settings, best: Solution, bound: float, seconds: float
) -> Solution:
    """Makes the largest stage small with all that it needs, not only what adds up."""
    begun = time.perf_counter()
    stages = costs.stages(best.assignment, options.in_flight, options.repeats)
    value = float(max(stage.memory_bytes for stage in stages))
    found = _least_memory(costs, options, best, value)
    if found.assignment is not None:
        best, value = replace(best, assignment=found.assignment), found.value
    method = f"{best.certificate.method}, stages priced whole"
    certificate = Certificate.of(
        value, max(bound, found.lower_bound), method, seconds + time.perf_counter() - begun
    )
    return replace(best, certificate=certificate)


def _within_limits(costs: StageCostModel, options: Settings) -> Solution:
    """Finds stages that keep limits which are tight for what does not add up."""
    free = msgspec.structs.replace(options, balance="memory", memory_limit=None)
    known = solve(problem_of(costs, free), time_budget=SECONDS, gap=CLOSE)
    found = _least_memory(costs, options, known, math.inf)
    if found.assignment is None:
        raise PlanError(
            "No plan was found that keeps the memory limit together with the buffers of its "
            f"messages. Received: memory_limit={options.memory_limit}. More stages or smaller "
            "micro-batches need less."
        )
    return replace(known, assignment=found.assignment)


def _least_memory(
    costs: StageCostModel, options: Settings, known: Solution, below: float
) -> LeastMemory:
    """Finds a plan whose largest stage is below so many bytes, if any."""
    problem = problem_of(costs, options)
    sums = StageSums(problem.static_memory, problem.activation_memory, problem.flight)
    return least_memory(
        costs, sums, options.in_flight, options.repeats, known.assignment, below, _limits(options)
    )


def given_solution(costs: StageCostModel, options: Settings, assignment: Sequence[int]) -> Solution:
    """Prices stages that are given; raises `PlanError` where they do not keep the limit."""
    solution = Solution(tuple(assignment), Certificate.of(0.0, 0.0, "as given", 0.0))
    above = _excess(costs, options, solution)
    if above > 0:
        raise PlanError(
            f"A stage of those that are given needs {above:.0f} bytes more than it may have. "
            f"Received: memory_limit={options.memory_limit}"
        )
    value = _value(costs, options, solution)
    return replace(solution, certificate=Certificate.of(value, 0.0, "as given", 0.0))


@dataclass(frozen=True, slots=True)
class _Formulation:
    """A problem to solve in place of the real one.

    Attributes:
        build: Makes the problem from memory limits.
        bounds: Whether it counts no more memory than is real, and makes the same thing small.
        is_last_resort: Whether it is for limits only that nothing before it keeps.
        attempts: How often to solve it, each time with less memory allowed.
    """

    build: Callable[[Limits | None], Problem]
    bounds: bool = True
    is_last_resort: bool = False
    attempts: int = 1


def _formulations(costs: StageCostModel, options: Settings) -> Iterator[_Formulation]:
    base = functools.partial(problem_of, costs, options)
    # What needs the least memory cannot do with less.
    attempts = 1 if options.balance == "memory" else MOST_ATTEMPTS
    if options.repeats:
        repeating = functools.partial(_recomputing, costs, options)
        yield _Formulation(repeating, attempts=attempts)
    yield _Formulation(base, attempts=attempts)
    uneven = len(set(options.repeated)) > 1
    if uneven or options.balance == "memory" or options.memory_limit is not None:
        yield _Formulation(functools.partial(base, cautious=True), bounds=False)
    if options.memory_limit is not None:
        yield _Formulation(lambda limit: replace(base(limit), objective="memory"), False, True)


def _recomputing(costs: StageCostModel, options: Settings, limit: Limits | None) -> Problem:
    return recomputing(problem_of(costs, options, limit), costs, options)


def _over_ranks(
    costs: StageCostModel, options: Settings, problem: Problem, solution: Solution
) -> Solution:
    """Makes the largest rank smaller where ranks have several stages, within the limits."""
    moved = balance_ranks(problem, solution.assignment, options.ranks, options.bubble_weight)
    other = replace(solution, assignment=moved)
    better = _step(costs, options, other) < _step(costs, options, solution)
    return other if better and _excess(costs, options, other) <= 0 else solution


def _step(costs: StageCostModel, options: Settings, solution: Solution) -> float:
    """What `balance_ranks` makes small, but for what is cut."""
    values = _values(costs, options, solution)
    return float(max(rank_totals(values, options.ranks))) + options.bubble_weight * max(values)


def _excess(costs: StageCostModel, options: Settings, solution: Solution) -> float:
    """Bytes of the stage that is most above its limit; 0 or less where all keep it."""
    stages = costs.stages(solution.assignment, options.in_flight, options.repeats)
    pairs = zip(stages, _limits(options), strict=True)
    return max(stage.memory_bytes - most for stage, most in pairs)


def _limits(options: Settings) -> Limits:
    """What each stage may have, infinitely much where nothing is said."""
    return options.limits or (math.inf,) * options.num_stages


def _value(costs: StageCostModel, options: Settings, solution: Solution) -> float:
    """The largest stage, or rank where ranks have several."""
    return float(max(rank_totals(_values(costs, options, solution), options.ranks)))


def _values(costs: StageCostModel, options: Settings, solution: Solution) -> list[float]:
    """FLOPs, seconds or bytes of each stage."""
    if options.balance == "flops":
        return list(np.bincount(solution.assignment, costs.flops(), options.num_stages))
    stages = costs.stages(solution.assignment, options.in_flight, options.repeats)
    if options.balance == "time":
        return [
            (stage.seconds or 0.0) + (stage.forward_seconds or 0.0) * again
            for stage, again in zip(stages, options.repeated, strict=True)
        ]
    if options.balance == "memory":
        return [float(stage.lasting_bytes) for stage in stages]
    return [float(stage.memory_bytes) for stage in stages]


def _within_limit(
    costs: StageCostModel,
    options: Settings,
    formulation: _Formulation,
    budget: float,
    near: Sequence[int] | None,
) -> tuple[Solution | None, float, float]:
    """Solves, and again with less memory allowed where a plan really needs more than the limit."""
    allowed = options.limits
    limit: Limits | None = allowed
    bound, seconds = math.inf, 0.0
    for _ in range(formulation.attempts):
        try:
            solution = solve(formulation.build(limit), time_budget=budget, gap=CLOSE, near=near)
        except PlanError as error:
            if limit == allowed and formulation.bounds:
                raise PlanError(f"{error}{_shared(costs.graph)}") from None
            break
        bound = min(bound, solution.certificate.lower_bound)
        seconds += solution.certificate.seconds
        if limit is None or (above := _excess(costs, options, solution)) <= 0:
            return solution, bound, seconds
        limit = [max(1.0, most - above) for most in limit]
    return None, bound, seconds


def _shared(graph: LayerGraph) -> str:
    if not graph.groups:
        return ""
    first = max(graph.groups, key=len)
    names = ", ".join(graph.nodes[i].name for i in sorted(first)[:4])
    return (
        " Operations that share statistics or seeds, which change whenever one of them runs, must "
        f"stay on one stage, e.g. {names}."
    )
