"""The matrix: all losses, metrics, layers, optimizers and callbacks of Keras, as pipelines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from tests.exactness import callbacks, expected, layers, losses, metrics, optimizers
from tests.exactness.trials import Judge, Trial, Verdict, together
from tests.helpers.mpi import mpi_run
from tests.helpers.training import use_float64

KINDS = {
    "losses": losses,
    "metrics": metrics,
    "layers": layers,
    "optimizers": optimizers,
    "callbacks": callbacks,
}
LAUNCHES = (("losses", "metrics"), ("layers",), ("optimizers", "callbacks"))
"""What one launch of two ranks tries: as much as others, so that cores end together."""

RANKS, SECONDS = 2, 1200.0


def trials_of(kind: str, pattern: str = "") -> list[Trial]:
    """The trials of a kind whose names match a regular expression from their start on."""
    return [make() for name, make in KINDS[kind].trials().items() if re.match(pattern, name)]


def judge_on_rank(kinds: Sequence[str]) -> dict[str, Any]:
    """Judges all trials of some kinds on this rank."""
    use_float64()
    judge = Judge()
    found = {}
    for kind in kinds:
        exact, others = [], []
        for trial in trials_of(kind):
            (exact if expected.is_exact(kind, trial.name) else others).append(trial)
        verdicts = judge.judge([*together(exact), *others])
        found[kind] = [dataclasses.asdict(verdict) for verdict in verdicts]
    return found


def judge_on_two_ranks(kinds: Sequence[str]) -> dict[str, list[Verdict]]:
    """Judges trials on two ranks, which must agree on all verdicts."""
    # A rank that fails alone leaves the others waiting.
    env = {"TNT_TIMEOUT": "60"}
    run = mpi_run(RANKS, judge_on_rank, kinds, timeout=SECONDS, env=env).check()
    first, second = run.results
    assert first == second
    return {kind: [Verdict(**v) for v in verdicts] for kind, verdicts in first.items()}
