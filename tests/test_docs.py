"""What the documents show is what the commands print."""

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
    assert shown == {"README.md", "docs/schedules.md"}
