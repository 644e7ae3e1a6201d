"""The command line itself: fast, and clear about mistakes."""

import subprocess
import sys

import pytest

from tarantella_pp.cli.main import COMMANDS
from tests.helpers.jobs import ROOT


def test_help_and_version_of_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "tarantella_pp"]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 30, "check": True}
    text = subprocess.run([*command, "--help"], **options).stdout
    for name in COMMANDS:
        assert f"\n  {name} " in text
    assert "--dry-run" in text
    assert "124" in text
    assert subprocess.run([*command, "--version"], **options).stdout.startswith("tarantella-pp ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "0", "x.py"], "Expected a positive integer. Received: '0'"),
        (["-np", "two", "x.py"], "Expected a positive integer. Received: 'two'"),
        (["--timeout", "0", "x.py"], "Expected more than 0 seconds"),
        (["-n", "2"], "No script to run"),
        (["-n", "2", "--"], "No script to run"),
        (["-n", "2", "--", "-m"], "No script to run"),
        (["missing.py"], "There is no script 'missing.py'"),
        (["plna", "make"], "no command of that name"),
        (["-n", "2", "--", "python3.11", "x.py"], "Leave out python3.11: ranks run this Python"),
        (["--mpi", "pvm", "x.py"], "pvm"),
        (["-x", "TNT_SURELY_NOT_SET", __file__], "no such variable"),
        (["--hostfile", "missing", __file__], "Cannot read --hostfile missing"),
        (["--thread", "2", "x.py"], "--thread"),
        (["--python-interpreter", "'", "x.py"], "closed quotes. Received:"),
        ([], "usage: tarantella"),
    ],
)
def test_wrong_usage_is_explained(command, arguments, complaint) -> None:
    assert command(*arguments) == 2
    assert complaint in command.stderr
    assert "Traceback" not in command.stderr


def test_the_demo_is_the_script_of_the_package_on_two_ranks(command):
    assert command("demo", "--dry-run", "--", "--epochs", 1) == 0
    assert "-n 2 " in command.stdout
    assert command.stdout.rstrip().endswith("-m tarantella_pp.demo --epochs 1")
