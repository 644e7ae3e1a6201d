"""What becomes of what is tried; all that is not named here must be exact."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

EXACT = "exact"
REFUSED = "refused"
BY_MICRO_BATCH = "per micro-batch"
"""Differs with several micro-batches, as said in the docs; exact with one, and on any ranks."""
NOT_IN_KERAS = "not in Keras"
"""Plain Keras does not train it."""
DIFFERS = "differs"
CRASHED = "crashed"


@dataclass(frozen=True)
class Verdict:
    name: str
    outcome: str
    error: float = 0.0
    message: str = ""


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
            )
        }
    },
    "metrics": {NOT_IN_KERAS: {"takes no targets": ("Mean", "Sum")}},
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


def reason(kind: str, name: str, outcome: str) -> str | None:
    """Why something may end otherwise than exactly; `None` if it should not end so."""
    for text, patterns in NOT_EXACT[kind].get(outcome, {}).items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return text
    return None


def outcome(kind: str, name: str) -> str:
    return next((o for o in NOT_EXACT[kind] if reason(kind, name, o) is not None), EXACT)


def unexpected(kind: str, verdicts: Sequence[Verdict]) -> list[str]:
    """The verdicts that are not exact and have no reason, in words."""
    return [
        f"{v.name}: {v.outcome} {v.error:.1e} {v.message}"
        for v in verdicts
        if v.outcome != EXACT and reason(kind, v.name, v.outcome) is None
    ]
