"""How many bytes of gradients replicas add up at a time."""

from __future__ import annotations

import os

from tarantella_pp.launch.guard.launch_environment import FUSION_VARIABLE
from tarantella_pp.partition.graph.units import parse_bytes
from tarantella_pp.partition.plan.plan_config import FUSION_THRESHOLD


def fusion_threshold_of(given: int | float | str | None) -> int:
    """Reads the option `fusion_threshold`, else the environment."""
    if given is not None:
        return parse_bytes(given, "fusion_threshold")
    text = os.environ.get(FUSION_VARIABLE, "").strip()
    return parse_bytes(text, FUSION_VARIABLE) if text else FUSION_THRESHOLD
