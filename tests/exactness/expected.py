"""What is not exact, and why; everything that is not named here must be."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from tests.exactness.trials import BY_MICRO_BATCH, EXACT, NOT_IN_KERAS, REFUSED, Verdict

SEVERAL_SAMPLES = "looks at several samples at once"
RANDOM = "draws other random numbers, as with another batch size"

# For each kind and outcome the reasons, with patterns of names as of a shell.
NOT_EXACT: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "losses": {
        NOT_IN_KERAS: {
            "no value for each entry, as masks and weights are": (
                "CTC, *, masked*",
                "Dice(axis), *, masked*",
                "*(axis=0), *, masked*",
                "*(axis=0), *, weighted",
            ),
        },
    },
    "metrics": {
        NOT_IN_KERAS: {"takes no targets": ("Mean", "Sum")},
    },
    "layers": {
        REFUSED: {
            "strings cannot be sent": ("StringLookup", "TextVectorization"),
            SEVERAL_SAMPLES: (
                "BatchNormalization(synchronized)",
                "CutMix",
                "Lambda over all samples",
                "MelSpectrogram",
                "MixUp",
            ),
            "updates its state each time it runs": ("SpectralNormalization",),
        },
        BY_MICRO_BATCH: {
            RANDOM: ("*Dropout*", "*(dropout)", "GaussianNoise", "Pipeline", "Random*"),
            "takes statistics of each micro-batch": ("BatchNormalization",),
        },
    },
    "optimizers": {},
    "callbacks": {
        REFUSED: {"writes one folder from several ranks": ("BackupAndRestore",)},
        NOT_IN_KERAS: {"needs a package that is not installed": ("OrbaxCheckpoint", "TensorBoard")},
    },
}


def reason(kind: str, verdict: Verdict) -> str | None:
    """Why a verdict is not exact; `None` if it should be, or if the outcome is another."""
    for text, patterns in NOT_EXACT[kind].get(verdict.outcome, {}).items():
        if any(_matches(verdict.name, pattern) for pattern in patterns):
            return text
    return None


def is_exact(kind: str, name: str) -> bool:
    """Whether nothing but exact numbers is expected."""
    return all(reason(kind, Verdict(name, outcome)) is None for outcome in NOT_EXACT[kind])


def unexpected(kind: str, verdicts: Sequence[Verdict]) -> list[str]:
    """The verdicts that are not exact and have no reason, in words."""
    return [
        f"{v.name}: {v.outcome} {v.error:.1e} {v.message}"
        for v in verdicts
        if v.outcome != EXACT and reason(kind, v) is None
    ]


def unused(kind: str, verdicts: Sequence[Verdict]) -> list[str]:
    """The patterns that match no verdict of their outcome."""
    return [
        pattern
        for outcome, reasons in NOT_EXACT[kind].items()
        for patterns in reasons.values()
        for pattern in patterns
        if not any(v.outcome == outcome and _matches(v.name, pattern) for v in verdicts)
    ]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)
