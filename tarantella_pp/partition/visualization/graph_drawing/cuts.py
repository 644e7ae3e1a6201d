"""The tensors between stages: which operation makes them, and which read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.crossings import crossings
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.plan import CutEdge, Plan

Place = tuple[int, int]
"""Stage and row; row -1 is the head of the stage."""


@dataclass(slots=True)
class CutTensor:
    """The tensors that leave one box for other stages.

    Attributes:
        source: The box.
        targets: The boxes that read them.
        tensors: The tensors.
    """

    source: Place
    targets: set[Place] = field(default_factory=set)
    tensors: list[CutEdge] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of one micro-batch of the tensors and their masks."""
        return sum(tensor.bytes + tensor.mask_bytes for tensor in self.tensors)


def cut_tensors(plan: Plan, graph: LayerGraph) -> dict[int, CutEdge]:
    """Finds the tensors of a graph that a plan's cuts are.

    Names do not tell, for Keras numbers layers anew in every process; the order does.
    """
    found = {}
    cuts = iter(plan.cuts)
    for tensor, source, targets in crossings(graph, plan.assignment):
        cut = next(cuts, None)
        if cut is None or (cut.source, cut.targets) != (source, targets):
            raise PlanError(f"The plan has no cut for '{tensor.name}', which crosses stages.")
        found[tensor.id] = cut
    for extra in cuts:
        raise PlanError(f"The plan cuts '{extra.tensor}', which stays on its stage.")
    return found


def producer_of(plan: Plan, cut: CutEdge) -> int:
    """Finds the operation that makes a cut tensor by name, where there is no graph."""
    own = [i for i, stage in enumerate(plan.assignment) if stage == cut.source]
    names = (cut.tensor, cut.tensor.rpartition("[")[0])
    return next((i for i in own if plan.node_names[i] in names), own[-1])
