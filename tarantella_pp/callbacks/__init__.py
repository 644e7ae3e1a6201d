"""Keras callbacks for pipelines, and the files of checkpoints.

    model.fit(x, y, callbacks=[tnt.callbacks.Timeline("trace.json")])

Keras' own callbacks work as well; `rank_rules` says which of them run on which rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tarantella_pp.errors import needed_for

if TYPE_CHECKING:
    from tarantella_pp.callbacks.checkpoint import Checkpoint
    from tarantella_pp.callbacks.on_one_rank import OnOneRank
    from tarantella_pp.callbacks.timeline import Timeline

__all__ = ["Checkpoint", "OnOneRank", "Timeline"]
_FILES = {"Checkpoint": "checkpoint", "OnOneRank": "on_one_rank", "Timeline": "timeline"}


def __getattr__(name: str) -> Any:
    """Loads a callback when it is first asked for: files are read without Keras."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_for("tarantella_pp.callbacks"):
        return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
