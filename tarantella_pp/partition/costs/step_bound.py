"""How long the step of a plan takes at least: what needs not be played to be ruled out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tarantella_pp.partition.costs.stage_costs import StageCostModel
from tarantella_pp.partition.graph.ideals import Array, summed
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan_parts import CutEdge
from tarantella_pp.schedule import ScheduleSpec
from tarantella_pp.schedule.actions import Compute


def least_step_seconds(
    costs: StageCostModel, assignment: Sequence[int], spec: ScheduleSpec, samples: float
) -> float:
    """Returns seconds that no simulated step of these stages is below.

    A rank begins when the stages before its first one have had a micro-batch, has all its work to
    do, and after its last backward pass come the backward passes of the stages before::

        rank 2  [F of 0 and 1] [ all micro-batches of rank 2 ] [B of 1 and 0]

    Messages, and what ranks wait for each other in between, come on top. Where no message goes,
    nobody waits: a stage before whose weights train nothing gets no gradient.
    """
    machine, count = costs.machine or HardwareSpec(), costs.micro_batches
    if costs.seconds is None:
        ahead, back = np.array(costs.roofline_seconds(samples, machine)).T
    else:
        ahead, back = samples / costs.micro_batch_size * np.array(costs.seconds, float).T
    forward = summed(assignment, ahead, spec.num_stages)
    backward = summed(assignment, back, spec.num_stages)
    kinds = {one.kind for own in spec.make(1).actions for one in own if isinstance(one, Compute)}
    # What goes on to other ranks first: all of a backward pass, or its part for the inputs.
    whole, first, parts = backward, backward, 1
    if "B" in kinds:
        alike = "BW" in kinds  # of both kinds, the quicker
        whole = backward * (min(1.0, machine.split_factor) if alike else machine.split_factor)
        first, parts = whole / 2, 1 if alike else 2
    once = machine.action_seconds
    forward, whole, first = forward + once, whole + parts * once, first + once
    cuts = costs.cuts(assignment)
    head = _longest(_links(cuts), forward)
    tail = _longest(_links(cut for cut in cuts if cut.has_gradient), first)
    least = 0.0
    for rank in range(spec.num_ranks):
        own = np.asarray(spec.placement) == rank
        alone = count * (forward + whole)[own].sum()
        handed_on = count * (forward + first)[own].sum() + tail[own].min()
        least = max(least, head[own].min() + max(alone, handed_on))
    return float(least)


def _links(cuts: Iterable[CutEdge]) -> set[tuple[int, int]]:
    """Returns the pairs of stages between which something is sent."""
    return {(cut.source, target) for cut in cuts for target in cut.targets}


def _longest(links: set[tuple[int, int]], seconds: Array) -> Array:
    """Returns the seconds of the stages on the longest way of messages to each stage."""
    found = np.zeros(len(seconds))
    for source, target in sorted(links):
        found[target] = max(found[target], found[source] + seconds[source])
    return found
