"""Where a tensor has its samples, and how many rows each adds to its first dimension.

Samples and windows merged into one dimension, tables of positions and scalars do not have one row
for each sample. Keras writes `None` for the first two alike, so shapes are worked out for two
numbers of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tarantella_pp.keras_internals.functional import (
    compute_output_spec,
    is_own_layer,
    network_of,
    tree,
)
from tarantella_pp.partition.extraction.masks import symbolic
from tarantella_pp.partition.graph.units import Shape

_SAMPLES = (4, 6)
Probe = tuple[Shape, ...] | None
"""The shapes of a tensor for so many samples; `None` where they cannot be told."""


def probe_of(shape: Shape) -> Probe:
    """Returns the shapes of a tensor that has a row for each sample."""
    return tuple((samples, *shape[1:]) for samples in _SAMPLES)


def rows_per_sample(probe: Probe) -> int | None:
    """Returns how many rows each sample adds to a tensor."""
    if probe is None:
        return None
    few, many = (shape[0] if shape else 0 for shape in probe)
    if few is None or many is None:
        return None
    rows, rest = divmod(many - few, _SAMPLES[1] - _SAMPLES[0])
    return rows if not rest and few in (rows * _SAMPLES[0], many) else None


def sample_axis(probe: Probe) -> int | None:
    """Returns along which dimension a tensor has its samples."""
    if probe is None:
        return 0
    few, many = probe
    grows = (axis for axis, sizes in enumerate(zip(few, many, strict=False)) if len({*sizes}) > 1)
    return next(grows, 0 if None in few else None)


def probe_call(
    node: Any, given: Mapping[int, tuple[Probe, str]], shapes: list[Shape]
) -> list[Probe]:
    """Works out the shapes that a call makes."""
    if is_own_layer(node.operation) and all(rows_per_sample(p) == 1 for p, _ in given.values()):
        return [probe_of(shape) for shape in shapes]
    results = []
    for i, _ in enumerate(_SAMPLES):
        free = {k: symbolic(p[i], dtype) for k, (p, dtype) in given.items() if p is not None}
        if len(free) < len(given):
            return [None] * len(shapes)
        args, kwargs = node.arguments.fill_in(free)
        try:
            if network_of(node.operation) is not None:
                specs = compute_output_spec(node.operation, *args, **kwargs)
            else:
                specs = node.operation.compute_output_spec(*args, **kwargs)
        except Exception:  # it needs another number of samples, or cannot run on placeholders
            return [None] * len(shapes)
        results.append([tuple(spec.shape) for spec in tree.flatten(specs)])
    return list(zip(*results, strict=True))
