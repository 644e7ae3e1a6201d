"""What a user reads where a package is missing."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
package, *names = sys.argv[1:]
sys.modules[package] = None
import tarantella_pp as tnt
from tarantella_pp.cli.main import main
for name in names:
    try:
        getattr(tnt, name)
    except ImportError as error:
        print(f"{type(error).__name__}: {error}")
try:
    tnt.callbacks.Timeline
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
for model in ("ResNet50", "examples/train_digits.py:build_model"):
    assert main(["plan", "make", model, "--stages", "2"]) == 1
"""
NAMES = {"PipelineModel": "models", "make_plan": "models", "profile": "models"}
"""Public names, and what is said to need the package."""


@pytest.mark.parametrize("package", ["tensorflow", "keras"])
def test_a_missing_package_is_named_with_its_remedy(package: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, *NAMES], capture_output=True, text=True, timeout=90
    )
    needs = f"needs {package}, which is not installed here: `pip install "
    for name, line in zip([*NAMES.values(), "callbacks"], answer.stdout.splitlines(), strict=True):
        assert line.startswith(f"MissingDependencyError: tarantella_pp.{name} {needs}")
    first, second = answer.stderr.splitlines()
    assert first.startswith(f"tarantella plan: keras.applications.ResNet50 {needs}")
    assert second.startswith(f"tarantella plan: examples/train_digits.py:build_model {needs}")
