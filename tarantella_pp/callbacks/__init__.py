"""Keras callbacks for pipelines.

    model.fit(x, y, callbacks=[tnt.callbacks.Timeline("trace.json")])

Keras' own callbacks work as well; `rank_rules` says which of them run on which rank.
"""

from __future__ import annotations

from tarantella_pp.dependencies import needed_for

with needed_for("tarantella_pp.callbacks"):
    from tarantella_pp.callbacks.checkpoint import Checkpoint
    from tarantella_pp.callbacks.timeline import Timeline

__all__ = ["Checkpoint", "Timeline"]
