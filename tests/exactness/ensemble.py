"""Several models side by side as one: tracing one large model takes less time than many small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import networkx as nx

from tarantella_pp.partition.best_stages import Solution
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import Certificate
from tarantella_pp.partition.planner import Planner
from tests.helpers.training import Case

Found = dict[str, Any]


@dataclass(frozen=True)
class Headed:
    """Makes a model of two parts; in an ensemble models share equal first parts."""

    trunk: Callable[[], tuple[Any, Any]]
    head: Callable[[Any], Any]

    def __call__(self) -> keras.Model:
        return self.on(*self.trunk())

    def on(self, inputs: Any, x: Any) -> keras.Model:
        """Makes a model with a first part that there is."""
        return keras.Model(inputs, self.head(x))


class Ensemble:
    """Models that share the optimizer, the steps and equal trunks, and train as each alone does.

    But a trunk gets the gradients of all its heads.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases
        trunks = [getattr(case.build, "trunk", None) for case in cases]
        # Those whose inputs no case before has.
        self._first = [
            i for i, trunk in enumerate(trunks) if trunk is None or trunk not in trunks[:i]
        ]
        self._places: list[list[int]] = []

    def case(self) -> Case:
        """What trains them all."""
        weights = [case.fit["sample_weight"] for case in self._cases if case.fit]
        return Case(
            self._build,
            [x for i in self._first for x in keras.tree.flatten(self._cases[i].x)],
            [case.y for case in self._cases],
            self._compiled,
            {"sample_weight": weights} if weights else {},
        )

    def split(self, found: Found) -> list[Found]:
        """What belongs to each model of the logs, predictions and weights of all."""
        return [
            {
                "logs": [_of_head(log, f"head{i}_") for log in found["logs"]],
                "predictions": found.get("predictions", self._places)[i],
                "weights": [found["weights"][place] for place in places],
            }
            for i, places in enumerate(self._places)
        ]

    def _build(self) -> keras.Model:
        trunks: dict[Any, tuple[Any, Any]] = {}
        models = []
        for case in self._cases:
            if isinstance(case.build, Headed):
                trunk = case.build.trunk
                trunks[trunk] = trunks.get(trunk) or trunk()
                models.append(case.build.on(*trunks[trunk]))
            else:
                models.append(case.build())
        for i, model in enumerate(models):
            model.layers[-1].name = f"head{i}"  # which Keras names its logs by
        whole = keras.Model(
            [x for i in self._first for x in models[i].inputs],
            [model.outputs[0] for model in models],
        )
        places = {id(weight): place for place, weight in enumerate(whole.weights)}
        self._places = [[places[id(weight)] for weight in model.weights] for model in models]
        return whole

    def _compiled(self) -> dict[str, Any]:
        options = [case.compiled() for case in self._cases]
        lists = ("loss", "metrics", "weighted_metrics")
        together = {name: [each[name] for each in options] for name in lists if name in options[0]}
        return {"optimizer": options[0]["optimizer"], **together}


def plan_across(model: keras.Model, num_micro_batches: int) -> Plan:
    """Two stages with a part of each model of an ensemble; to find the best ones takes long."""
    planner = Planner.of(model)
    graph = nx.DiGraph(planner.graph.edges)
    graph.add_nodes_from(node.id for node in planner.graph.nodes)
    before, after = _longest_paths(graph), _longest_paths(graph.reverse())
    assignment = tuple(int(before[node.id] > after[node.id]) for node in planner.graph.nodes)
    certificate = Certificate.of(1.0, 0.0, "half of each model", 0.0)
    options = PlanOptions(
        num_stages=2,
        batch_size=32,
        num_micro_batches=num_micro_batches,
        num_replicas=1,
        schedule="1f1b",
        balance="memory",
        memory_limit=None,
    ).settled()
    return planner.write(Solution(assignment, certificate), options)


def _longest_paths(graph: nx.DiGraph) -> dict[int, int]:
    """How many edges the longest path to each node has."""
    found: dict[int, int] = {}
    for node in nx.topological_sort(graph):
        found[node] = max((found[p] + 1 for p in graph.predecessors(node)), default=0)
    return found


def _of_head(log: Found, prefix: str) -> Found:
    return {k.removeprefix(prefix): value for k, value in log.items() if k.startswith(prefix)}
