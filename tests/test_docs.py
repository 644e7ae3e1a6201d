"""What users read: what the documents show is printed, and a missing package is named."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "document", ["README.md", pytest.param("docs/schedules.md", marks=pytest.mark.slow)]
)
def test_outputs_are_those_of_today(document: str) -> None:
    """If not: `python docs/outputs.py` writes them anew."""
    command = [sys.executable, "docs/outputs.py", "--check", document]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stdout or answer.stderr


def test_all_commands_with_outputs_are_run() -> None:
    documents = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    shown = {
        str(path.relative_to(ROOT)) for path in documents if "\n$ tarantella " in path.read_text()
    }
    # Examples train for minutes; test_examples.py runs them, smaller.
    assert shown == {"README.md", "docs/schedules.md", "docs/examples.md"}


PROGRAM = """
import operator, sys
package, *names = sys.argv[1:]
sys.modules[package] = None
import tarantella_pp as tnt
from tarantella_pp.cli.main import main
for name in names:
    try:
        operator.attrgetter(name)(tnt)
    except ImportError as error:
        print(f"{type(error).__name__}: {error}")
for model in ("ResNet50", "tarantella_pp.demo:build_model"):
    assert main(["plan", "make", model, "--stages", "2"]) == 1
"""
NAMES = dict.fromkeys(("PipelineModel", "make_plan", "profile"), "models")
NAMES["callbacks.Timeline"] = "callbacks"
"""Public names, and what is said to need the package."""


@pytest.mark.parametrize("package", ["tensorflow", "keras"])
def test_a_missing_package_is_named_with_its_remedy(package: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, *NAMES], capture_output=True, text=True, timeout=90
    )
    needs = f"needs {package}, which is not installed here: `pip install "
    for name, line in zip(NAMES.values(), answer.stdout.splitlines(), strict=True):
        assert line.startswith(f"MissingDependencyError: tarantella_pp.{name} {needs}")
    first, second = answer.stderr.splitlines()
    assert first.startswith(f"tarantella plan: keras.applications.ResNet50 {needs}")
    assert second.startswith(f"tarantella plan: tarantella_pp.demo:build_model {needs}")
