"""The same problem from behind: the last stage first, for searches that begin where less fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tarantella_pp.partition.solvers.exact.ideals import pack, unpack
from tarantella_pp.partition.solvers.exact.stage_pricing import IdealFamily
from tarantella_pp.partition.solvers.problem.instance import Instance, Resource
from tarantella_pp.partition.solvers.problem.problem import IntArray

#: Memberships turned at the most, one for each node and ideal.
MOST = 10_000_000


def reversed_instance(instance: Instance) -> Instance | None:
    """Turns an instance around: node v becomes n - 1 - v, and stage s becomes S - 1 - s."""
    if any(resource.terms.has_receive for resource in instance.resources):
        return None
    last = instance.num_nodes - 1
    preds = [tuple(sorted(last - after for after in one)) for one in reversed(instance.succs)]
    succs = [tuple(sorted(last - before for before in one)) for one in reversed(instance.preds)]
    return replace(
        instance,
        preds=tuple(preds),
        succs=tuple(succs),
        resources=tuple(_turned(resource, last) for resource in instance.resources),
        place=np.where(instance.place >= 0, last - instance.place, -1),
    )


def _turned(resource: Resource, last: int) -> Resource:
    pins = tuple(tuple(last - pin for pin in reversed(one)) for one in resource.terms.pins)
    producer = resource.terms.producer
    return replace(
        resource,
        fixed=resource.fixed[::-1].copy(),
        held=resource.held[::-1].copy(),
        factor=resource.factor[::-1].copy(),
        scale=resource.scale[::-1].copy(),
        cap=resource.cap[::-1].copy(),
        terms=replace(
            resource.terms, pins=pins, producer=np.where(producer >= 0, last - producer, producer)
        ),
    )


def reversed_family(family: IdealFamily) -> IdealFamily | None:
    """Turns a family around: what an ideal leaves out is the ideal from behind."""
    instance = reversed_instance(family.instance)
    if instance is None or len(family) * instance.num_nodes > MOST:
        return None
    member = unpack(family.words, instance.num_nodes)
    return IdealFamily(instance, pack(member[::-1, ::-1] == 0))


def reversed_stages(stages: IntArray, num_stages: int) -> IntArray:
    """Turns the stages of the mirrored instance back."""
    turned: IntArray = num_stages - 1 - stages[::-1]
    return turned
