"""What tensors are to stages: their rows for each sample, and the masks that are on them.

Masks are hidden boolean tensors that layers attach to their results. Some layers also take masks
away: attention deletes its inputs' masks, in place, so whoever reads the same tensor later finds
none. Stages hold copies, so this has to be known.

Rows: samples and windows merged into one dimension, tables of positions and scalars do not have one
row for each sample. Keras writes `None` for the first two alike, so shapes are worked out for two
numbers of samples.

What layers of Keras say of themselves is taken from them; whatever else is called is traced
(`layer_inside.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from tarantella_pp.internals import functional
from tarantella_pp.partition.graph.units import Shape

# Dimensions that differ hold samples. Neither number is 1, which broadcasting would hide, and
# neither divides the other, so that samples merged with windows are not taken for samples alone.
SAMPLES = (4, 6)
# Sizes that unknown dimensions are tried with, for layers have limits; they count as the first.
SIZES = (256, 64, 16, 8, 4)
# The shapes of a tensor for 4 and for 6 samples; `None` where they are unknown.
Probe = tuple[Shape, ...] | None


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """A tensor that is given to a call, or that a call makes."""

    shape: Shape
    dtype: str
    mask_shape: Shape | None  # of its mask; `None` without one
    probe: Probe  # its shapes for two numbers of samples
    has_gradient: bool = False  # whether the backward pass sends a gradient over it

    @property
    def rows(self) -> int | None:
        """How many rows each sample adds to it."""
        if self.probe is None:
            return None
        few, many = (shape[0] if shape else 0 for shape in self.probe)
        if few is None or many is None:
            return None
        rows, rest = divmod(many - few, SAMPLES[1] - SAMPLES[0])
        return rows if not rest and few in (rows * SAMPLES[0], many) else None

    @property
    def sample_axis(self) -> int | None:
        """Along which dimension it has its samples."""
        if self.probe is None:
            return 0
        few, many = self.probe
        pairs = enumerate(zip(few, many, strict=False))
        grows = (axis for axis, sizes in pairs if len({*sizes}) > 1)
        return next(grows, 0 if None in few else None)

    def symbolic(self, samples: int | None = None, size: int | None = None) -> Any:
        """A symbolic tensor outside of every model, for one of the numbers of samples or for any.

        Nothing that is called on it is recorded. Unknown dimensions have a size then.
        """
        shape, mask_shape = self.shape, self.mask_shape
        if samples is not None:
            known = (SAMPLES[samples], *shape[1:]) if shape else ()
            known = known if self.probe is None else self.probe[samples]
            shape = tuple(size if one is None else one for one in known)
            if mask_shape is not None:
                pairs = zip(mask_shape, shape, strict=False)
                mask_shape = tuple(actual if one is None else one for one, actual in pairs)
        tensor = keras.KerasTensor(shape, self.dtype, name="free")
        if mask_shape is not None:
            functional.set_mask(tensor, keras.KerasTensor(mask_shape, "bool", name="free_mask"))
        return tensor


def probe_of(shape: Shape) -> Probe:
    """Returns the shapes of a tensor that has a row for each sample."""
    return tuple((samples, *shape[1:]) for samples in SAMPLES)


def is_known_by_rule(operation: Any, given: Mapping[int, SeenTensor]) -> bool:
    """Whether a call makes what it says that it makes, and its masks follow a rule of Keras."""
    if len({tensor.rows for tensor in given.values()}) > 1:
        # What layers say of their results' shapes is often the shape of the first thing that they
        # are given, such as learned queries, which have no samples.
        return False
    if isinstance(operation, keras.layers.Layer):
        return functional.is_own_layer(operation)
    return all(tensor.mask_shape is None for tensor in given.values())


def made_by_rule(node: Any, given: Mapping[int, SeenTensor]) -> tuple[list[SeenTensor], set[int]]:
    """What a call makes as it says itself, and the keys of arguments whose masks it deletes."""
    free = {key: tensor.symbolic() for key, tensor in given.items()}
    pairs = [(t, free[id(t)]) for t in node.input_tensors]
    same = all((*t.shape, t.dtype) == (*given.shape, given.dtype) for t, given in pairs)
    if same and functional.network_of(node.operation) is None:
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in node.outputs]
    else:  # a nested model is called on others than it was built with, or Keras guesses
        specs = _specs(node, free)
    masks, removed = _masks(node, free, len(specs))
    probes = _probes(node, given, [shape for shape, _ in specs])
    made = zip(specs, masks, probes, strict=True)
    return [SeenTensor(shape, dtype, mask, probe) for (shape, dtype), mask, probe in made], removed


def _specs(node: Any, free: dict[int, Any]) -> list[tuple[Shape, str]]:
    args, kwargs = node.arguments.fill_in(free)
    if functional.network_of(node.operation) is not None:
        specs = functional.compute_output_spec(node.operation, *args, **kwargs)
    else:
        specs = node.operation.compute_output_spec(*args, **kwargs)
    return [(tuple(spec.shape), spec.dtype) for spec in functional.tree.flatten(specs)]


def _probes(node: Any, given: Mapping[int, SeenTensor], shapes: list[Shape]) -> list[Probe]:
    alike = all(tensor.rows == 1 for tensor in given.values())
    if alike and functional.is_own_layer(node.operation):
        return [probe_of(shape) for shape in shapes]
    found = _probed(node, given, None)
    if any(map(_is_open, found)) and not any(_is_open(tensor.probe) for tensor in given.values()):
        # It counts steps, of which there is no number yet: one is made up.
        sized = next(filter(None, (_probed(node, given, size) for size in SIZES)), found)
        found = [
            other if _is_open(probe) and other[0][:1] == other[1][:1] else probe
            for probe, other in zip(found, sized, strict=True)
        ]
    return found or [None] * len(shapes)


def _is_open(probe: Probe) -> bool:
    """Whether the size of the first dimension is not known for any number of samples."""
    return probe is not None and probe[0][:1] == (None,)


def _probed(node: Any, given: Mapping[int, SeenTensor], size: int | None) -> list[Any]:
    """The shapes that a call makes, with a size for those that are unknown; none if it fails."""
    # See `is_known_by_rule`.
    if len({t.rows for t in given.values()}) > 1 or any(t.probe is None for t in given.values()):
        return []
    results = []
    for samples, _ in enumerate(SAMPLES):
        free = {key: tensor.symbolic(samples, size) for key, tensor in given.items()}
        try:
            results.append([shape for shape, _ in _specs(node, free)])
        except Exception:  # it needs another number of samples, or cannot run on placeholders
            return []
    return list(zip(*results, strict=True))


def _masks(node: Any, free: dict[int, Any], count: int) -> tuple[list[Shape | None], set[int]]:
    """Masks of results, and keys of tensors that lose theirs, as in `keras.Layer.__call__`."""
    operation, (args, kwargs) = node.operation, node.arguments.fill_in(free)
    removed = set[int]()
    # Attention passes masks to its softmax and then deletes them from the tensors it was given.
    if isinstance(operation, keras.layers.MultiHeadAttention):
        removed = {key for key, tensor in free.items() if functional.get_mask(tensor) is not None}
    nothing: list[Shape | None] = [None] * count
    if not getattr(operation, "supports_masking", False):
        return nothing, removed
    first = args[0] if args else next(iter(kwargs.values()), None)
    previous = kwargs.get("mask")
    if previous is None:
        previous = functional.tree.map_structure(functional.get_mask, first)
    masks = previous
    if not functional.is_default(operation.compute_mask):
        masks = operation.compute_mask(first, previous)
    shapes = [None if m is None else tuple(m.shape) for m in functional.tree.flatten(masks)]
    return (shapes + nothing)[:count], removed
