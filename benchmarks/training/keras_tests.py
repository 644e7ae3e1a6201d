"""Keras' own tests that train a model, with each model made a pipeline: do they still pass?

    python benchmarks/training/keras_tests.py
    python benchmarks/training/keras_tests.py trainers callbacks

Runs the tests that come with the installed Keras, first as they are, then those that train and pass
once more with each model a `PipelineModel` of two stages and two micro-batches in one process, and
prints what became of them. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import keras
from rich.console import Console
from rich.table import Table

FOLDERS = ("trainers", "callbacks", "models", "saving", "losses", "metrics", "optimizers")
SOURCE = Path(keras.__file__).parent / "src"
KINDS = {
    "a subclassed model": r"subclassed model|is not built|a single layer",
    "an own step": r"overrides",
    "sparse or ragged tensors": r"sparse|ragged|Ragged|Sparse",
    "optional inputs": r"optional",
    "export": r"export",
    "a layer that writes its state in each forward pass": r"writes its variable",
}
"""Why a test is refused, by what the message says."""

Row = tuple[str, str, bool, str, str]


def run(mode: str, tests: Sequence[str]) -> list[Row]:
    """Runs folders or tests of Keras.

    Returns:
        Name, outcome, whether it trains, refusal and error of each.
    """
    if not tests:
        return []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        names = Path(folder) / "tests"
        names.write_text("\n".join(f"{SOURCE}/{test}" for test in tests))
        here = Path(__file__).parent
        paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "KERAS_TESTS": mode,
            "KERAS_TESTS_REPORT": str(report),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        options = ["-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-p", "wrapped_models"]
        options += ["-W", "ignore", "-c", os.devnull, "--rootdir", str(SOURCE)]
        options += ["--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", *options, f"@{names}"]
        subprocess.run(command, env=env, cwd=folder, check=False)
        return [tuple(json.loads(line)) for line in report.read_text().splitlines()]


def outcome_of(row: Row) -> str:
    """What became of a wrapped test, in a few words."""
    _, outcome, _, refusal, _ = row
    if outcome == "passed":
        return "passes"
    if not refusal:
        return "breaks"
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, refusal))
    return f"refused: {next(found, 'another reason')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="of keras/src")
    folders = parser.parse_args().folders
    plain = run("plain", folders)
    trained = [name for name, outcome, trains, _, _ in plain if trains and outcome == "passed"]
    wrapped = run("wrapped", trained)
    table = Table("Keras' tests that train", "number")
    for kind, number in sorted(Counter(map(outcome_of, wrapped)).items()):
        table.add_row(kind, str(number))
    console = Console()
    console.print(table)
    for row in wrapped:
        if outcome_of(row) in ("breaks", "refused: another reason"):
            console.print(f"{row[0]}: {row[3] or row[4]}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
