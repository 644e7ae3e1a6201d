"""The command line itself: fast, and clear about mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tarantella_pp.cli import main as command
from tests.helpers.jobs import ROOT


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tarantella_pp", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_help_names_the_commands() -> None:
    text = call("--help").stdout
    for name in command.COMMANDS:
        assert f"\n  {name} " in text
    assert "--dry-run" in text
    assert "124" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "0", "x.py"], "Expected a positive integer. Received: '0'"),
        (["-n", "two", "x.py"], "Expected a positive integer. Received: 'two'"),
        (["--timeout", "0", "x.py"], "Expected more than 0 seconds, e.g. '90'"),
        (["--timeout", "soon", "x.py"], "Received: 'soon'"),
        (["-n", "2"], "No script to run"),
        (["-n", "2", "--"], "No script to run"),
        (["-n", "2", "--", "-m"], "No script to run"),
        (["missing.py"], "There is no script 'missing.py'"),
        (["--mpi", "pvm", "x.py"], "pvm"),
        (["-x", "A-B=1", "pyproject.toml"], "Received: -x A-B=1"),
        (["-x", "TNT_SURELY_NOT_SET", "pyproject.toml"], "no such variable"),
        (["--hostfile", "missing", "pyproject.toml"], "Cannot read --hostfile missing"),
        (["--thread", "2", "x.py"], "--thread"),
        ([], "usage: tarantella"),
    ],
)
def test_wrong_usage_is_explained(arguments: list[str], complaint: str) -> None:
    answer = call(*arguments)
    assert answer.returncode == 2
    assert complaint in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_hostfile_cannot_smuggle_options(tmp_path, capsys) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\n-oProxyCommand=evil\n")
    assert command.main(["--hostfile", str(hosts), "--dry-run", __file__]) == 2
    assert "-oProxyCommand=evil" in capsys.readouterr().err


def test_the_version_is_printed() -> None:
    assert call("--version").stdout.startswith("tarantella-pp ")
