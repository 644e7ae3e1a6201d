"""What a call does that its node does not say: found by calling it on placeholders.

Masks are hidden boolean tensors that layers attach to their results. Some layers also take masks
away: attention deletes its inputs' masks, in place, so whoever reads the same tensor later finds
none. Stages hold copies, so this has to be known.

Rows: samples and windows merged into one dimension, tables of positions and scalars do not have one
row for each sample. Keras writes `None` for the first two alike, so shapes are worked out for two
numbers of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from tarantella_pp.internals.functional import (
    compute_output_spec,
    get_mask,
    is_default,
    is_own_layer,
    network_of,
    set_mask,
    tree,
)
from tarantella_pp.partition.graph.units import Shape


@dataclass(frozen=True, slots=True)
class MaskFlow:
    """What a call does to masks."""

    # Shape of the mask on each of its results; `None` for no mask
    outputs: tuple[Shape | None, ...]
    removed: frozenset[int] = frozenset()  # `id` of the symbolic arguments whose masks it deletes
    dtypes: tuple[str, ...] = ()  # of its results, where it was run: it may say others


def symbolic(shape: Shape, dtype: str, mask_shape: Shape | None = None) -> Any:
    """Makes a symbolic tensor outside of every model; nothing called on it is recorded."""
    tensor = keras.KerasTensor(shape, dtype, name="free")
    if mask_shape is not None:
        set_mask(tensor, keras.KerasTensor(mask_shape, "bool", name="free_mask"))
    return tensor


def mask_flow(operation: Any, args: Any, kwargs: dict[str, Any], num_outputs: int) -> MaskFlow:
    """Says what a call does to masks.

    Layers of Keras follow a rule; layers of others, and operations on masked tensors, are run
    once on placeholders to see.
    """
    tensors = [t for t in tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
    masked = any(get_mask(tensor) is not None for tensor in tensors)
    is_layer = isinstance(operation, keras.layers.Layer)
    if not masked and not is_layer:
        return MaskFlow((None,) * num_outputs)
    if not is_own_layer(operation):
        try:
            return _observed(operation, args, kwargs, tensors)
        except Exception:  # it cannot run on placeholders of unknown sizes: the rule must do
            if not is_layer:
                return MaskFlow((None,) * num_outputs)
    return _by_rule(operation, args, kwargs, tensors, num_outputs)


def _by_rule(
    operation: Any, args: Any, kwargs: dict[str, Any], tensors: list[Any], num_outputs: int
) -> MaskFlow:
    """Follows `keras.Layer.__call__`."""
    removed = frozenset[int]()
    # Attention passes masks to its softmax and then deletes them from the tensors it was given.
    if isinstance(operation, keras.layers.MultiHeadAttention):
        removed = frozenset(id(tensor) for tensor in tensors if get_mask(tensor) is not None)
    nothing: tuple[Shape | None, ...] = (None,) * num_outputs
    if not operation.supports_masking:
        return MaskFlow(nothing, removed)
    first = args[0] if args else next(iter(kwargs.values()), None)
    previous = kwargs.get("mask")
    if previous is None:
        previous = tree.map_structure(get_mask, first)
    masks = previous
    if not is_default(operation.compute_mask):
        masks = operation.compute_mask(first, previous)
    if masks is None:
        return MaskFlow(nothing, removed)
    shapes = tuple(None if mask is None else tuple(mask.shape) for mask in tree.flatten(masks))
    return MaskFlow((shapes + nothing)[:num_outputs], removed)


def _observed(operation: Any, args: Any, kwargs: dict[str, Any], tensors: list[Any]) -> MaskFlow:
    """Runs the call on placeholders, in a graph that is thrown away."""
    flat = tree.flatten((args, kwargs))
    places = [i for i, value in enumerate(flat) if isinstance(value, keras.KerasTensor)]
    masks = [get_mask(tensor) for tensor in tensors]
    seen: dict[str, Any] = {}

    def run(args: Any, kwargs: Any, masks: Any) -> Any:
        flat = tree.flatten((args, kwargs))
        values = [flat[i] for i in places]
        for value, mask in zip(values, masks, strict=True):
            if mask is not None:
                set_mask(value, mask)
        result = operation(*args, **kwargs)
        seen["outputs"] = tuple(
            None if mask is None else tuple(mask.shape)
            for mask in (get_mask(value) for value in tree.flatten(result))
        )
        seen["left"] = [get_mask(value) is not None for value in values]
        return result

    made = compute_output_spec(run, args, kwargs, masks)
    left = zip(tensors, masks, seen["left"], strict=True)
    return MaskFlow(
        seen["outputs"],
        frozenset(id(t) for t, mask, stays in left if mask is not None and not stays),
        tuple(t.dtype for t in tree.flatten(made) if isinstance(t, keras.KerasTensor)),
    )


# Dimensions that differ hold samples. Neither number is 1, which broadcasting would hide, and
# neither divides the other, so that samples merged with windows are not taken for samples alone.
SAMPLES = (4, 6)
# Sizes that unknown dimensions are tried with; layers have limits.
SIZES = (256, 64, 16, 8, 4)
# The shapes of a tensor for 4 and for 6 samples; `None` where they are unknown.
Probe = tuple[Shape, ...] | None


def probe_of(shape: Shape) -> Probe:
    """Returns the shapes of a tensor that has a row for each sample."""
    return tuple((samples, *shape[1:]) for samples in SAMPLES)


def rows_per_sample(probe: Probe) -> int | None:
    """Returns how many rows each sample adds to a tensor."""
    if probe is None:
        return None
    few, many = (shape[0] if shape else 0 for shape in probe)
    if few is None or many is None:
        return None
    rows, rest = divmod(many - few, SAMPLES[1] - SAMPLES[0])
    return rows if not rest and few in (rows * SAMPLES[0], many) else None


def sample_axis(probe: Probe) -> int | None:
    """Returns along which dimension a tensor has its samples."""
    if probe is None:
        return 0
    few, many = probe
    grows = (axis for axis, sizes in enumerate(zip(few, many, strict=False)) if len({*sizes}) > 1)
    return next(grows, 0 if None in few else None)


def made_specs(node: Any, free: dict[int, Any], *, run: bool = False) -> list[tuple[Shape, str]]:
    """Returns shapes and dtypes that a call makes, as it says itself, or as running it shows."""
    args, kwargs = node.arguments.fill_in(free)
    if run or network_of(node.operation) is not None:
        specs = compute_output_spec(node.operation, *args, **kwargs)
    else:
        specs = node.operation.compute_output_spec(*args, **kwargs)
    return [(tuple(spec.shape), spec.dtype) for spec in tree.flatten(specs)]


def probe_call(
    node: Any, given: Mapping[int, tuple[Probe, str]], shapes: list[Shape]
) -> list[Probe]:
    """Works out the shapes that a call makes."""
    if is_own_layer(node.operation) and all(rows_per_sample(p) == 1 for p, _ in given.values()):
        return [probe_of(shape) for shape in shapes]
    # What layers say of their results' shapes is often that of the first thing that they are given,
    # such as learned queries, which have no samples.
    run = len({rows_per_sample(p) for p, _ in given.values()}) > 1
    found = _probed(node, given, run, None)
    if any(map(_is_open, found)) and not any(_is_open(probe) for probe, _ in given.values()):
        # It counts steps, of which there is no number yet: one is made up.
        sized = next(filter(None, (_probed(node, given, run, size) for size in SIZES)), found)
        found = [
            other if _is_open(probe) and other[0][:1] == other[1][:1] else probe
            for probe, other in zip(found, sized, strict=True)
        ]
    return found or [None] * len(shapes)


def _is_open(probe: Probe) -> bool:
    """Whether the size of the first dimension is not known for any number of samples."""
    return probe is not None and probe[0][:1] == (None,)


def _probed(
    node: Any, given: Mapping[int, tuple[Probe, str]], run: bool, size: int | None
) -> list[Any]:
    """The shapes that a call makes, with a size for those that are unknown; none if it fails."""
    results = []
    for i, _ in enumerate(SAMPLES):
        free = {
            key: symbolic(tuple(size if n is None else n for n in probe[i]), dtype)
            for key, (probe, dtype) in given.items()
            if probe is not None
        }
        if len(free) < len(given):
            return []
        try:
            results.append([shape for shape, _ in made_specs(node, free, run=run)])
        except Exception:  # it needs another number of samples, or cannot run on placeholders
            return []
    return list(zip(*results, strict=True))
