"""How a value of a whole batch follows from those of its parts, found by comparing.

    parts of 2 and 4 samples give a and b, of what began with s; the whole of 6 gives

    same    a = b                nothing in it follows from the samples
    mean    (2 a + 4 b) / 6      weighted by samples
    sum     s + (a-s) + (b-s)    what the parts add to it

What may be of several kinds in one trial is of the one that it may be of in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

SAME, MEAN, SUM = "same", "mean", "sum"
ALL = frozenset((SAME, MEAN, SUM))

_ROUNDING = 64
"""Units of rounding of the value itself that count as no difference."""
_FLOOR = 1e-2
"""What of the tolerance for the largest of several values counts for all of them."""

Array = np.ndarray[Any, Any]


def kinds_of(
    start: Array,
    whole: Array,
    parts: Sequence[Array],
    shares: Sequence[float],
    tolerance: float,
    largest: float = 0.0,
) -> frozenset[str]:
    """Tells how a value follows from those of parts."""
    if any(part.shape != whole.shape for part in (start, *parts)):
        return frozenset()
    before, after, *each = [value.astype(np.float64) for value in (start, whole, *parts)]
    if not all(np.isfinite(value).all() for value in (before, after, *each)):
        return ALL
    limit = _limit(whole.dtype, before, [after, *each], tolerance, largest)

    def close(value: Array) -> bool:
        return bool(np.all(np.abs(value - after) <= limit))

    weighted = [share * part for share, part in zip(shares, each, strict=True)]
    found = {
        SAME: all(map(close, each)),
        MEAN: close(np.sum(weighted, axis=0)),
        SUM: close(before + np.sum([part - before for part in each], axis=0)),
    }
    return frozenset(kind for kind, is_it in found.items() if is_it)


def _limit(
    dtype: Any, start: Array, values: Sequence[Array], tolerance: float, largest: float
) -> float:
    """How far apart two values may be that count as the same."""
    try:
        unit = float(ml_dtypes.finfo(dtype).eps)
    except ValueError:  # of whole numbers
        return 0.0
    change = max(float(np.max(np.abs(value - start), initial=0.0)) for value in values)
    size = max(float(np.max(np.abs(value), initial=0.0)) for value in values)
    return tolerance * max(change, _FLOOR * largest) + _ROUNDING * unit * size


def chosen(kinds: frozenset[str], order: Sequence[str]) -> str | None:
    """Chooses one of the kinds that a value may be of."""
    return next((kind for kind in order if kind in kinds), None)


def chosen_together(found: Mapping[int, frozenset[str]]) -> dict[int, str | None]:
    """Chooses the kinds of gradients of one update: what shows nothing is as the others are."""
    told = {MEAN if MEAN in kinds else SUM for kinds in found.values() if SUM not in kinds}
    order = (MEAN, SUM) if told else (SUM, MEAN)
    if all(kinds == ALL for kinds in found.values()):  # nothing is known of any of them
        order = (MEAN, SUM)
    return {i: chosen(kinds, order) for i, kinds in found.items()}
