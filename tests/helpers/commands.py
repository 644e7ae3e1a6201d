"""Runs subcommands in this process or in one of their own, and keeps what they write."""

import json
import subprocess
import sys

import pytest

from tarantella_pp.cli.main import main
from tests.helpers.jobs import ROOT

GRAPH = str(ROOT / "tests" / "partition" / "graph" / "diamonds.json")
"""A graph that is not Keras' own, of 14 operations."""
HEAVY = {"tensorflow", "keras", "mpi4py", "networkx", "jinja2"}


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.stdout = self.stderr = ""

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        self.stdout, self.stderr = self._capsys.readouterr()
        return code

    def json(self, *arguments: object) -> dict:
        assert self(*arguments, "--json") == 0, self.stderr
        assert self.stderr == ""
        return json.loads(self.stdout, parse_constant=_refuse)

    def fails(self, code: int, *arguments: object) -> str:
        """Returns the one line that says what is wrong."""
        assert self(*arguments) == code, (self.stdout, self.stderr)
        assert self.stdout == ""
        assert self.stderr.count("\n") == 1
        assert self.stderr.endswith("\n")
        assert "Traceback" not in self.stderr
        assert self.stderr.startswith(("tarantella plan", "tarantella simulate"))
        return self.stderr


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def all_loaded_by(code: str) -> set[str]:
    """Runs code in a fresh interpreter and returns the modules it has loaded."""
    report = "import json, sys; sys.stderr.write(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(json.loads(done.stderr))
