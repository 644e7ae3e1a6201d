"""The matrix: all losses, metrics, layers, optimizers and callbacks of Keras, as pipelines."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from tests.exactness import callbacks, layers, losses, metrics, optimizers
from tests.exactness.expected import Verdict
from tests.exactness.trials import Judge
from tests.helpers.mpi import mpi_run
from tests.helpers.training import use_float64

KINDS = {
    "losses": losses,
    "metrics": metrics,
    "layers": layers,
    "optimizers": optimizers,
    "callbacks": callbacks,
}
LAUNCHES = (("losses", "metrics", "optimizers", "callbacks"), ("layers",))
"""What one launch of two ranks tries."""


def judge(kind: str, pattern: str = "") -> list[Verdict]:
    """Judges all of a kind whose names match a regular expression from their start on."""
    parts = [part for part in KINDS[kind].parts() if re.match(pattern, part.name)]
    return Judge(kind, KINDS[kind].trial).judge(parts)


def judge_on_rank(kinds: Sequence[str]) -> dict[str, Any]:
    use_float64()
    return {kind: list(map(dataclasses.asdict, judge(kind))) for kind in kinds}


def judge_on_two_ranks(kinds: Sequence[str]) -> dict[str, list[Verdict]]:
    """Judges some kinds on two ranks, which must agree on all verdicts."""
    # A rank that fails alone leaves the others waiting.
    env = {"TNT_TIMEOUT": "60"}
    run = mpi_run(2, judge_on_rank, kinds, timeout=1200, env=env).check()
    first, second = run.results
    assert first == second
    return {kind: [Verdict(**v) for v in verdicts] for kind, verdicts in first.items()}
