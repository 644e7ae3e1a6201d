"""A job in which nothing goes wrong."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.cli.jobs import PYTHONS, tarantella

pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("python", PYTHONS)]


@pytest.mark.parametrize("start", [["-n", "2", "--"], ["run", "-n", "2"]])
def test_the_script_gets_its_arguments_and_one_rank_prints(python: str, start: list[str]) -> None:
    with tarantella(python, *start, "hello.py", "-n", "7", "--", "x y") as job:
        result = job.result()
        assert not job.processes()
    assert result.code == 0, result.stderr
    first, second, _ = result.stdout.splitlines()
    assert first == "hello 1 2 -n 7 -- x y"
    assert second == "main __main__ scripts hello.py"
    assert sorted(result.stderr.splitlines()) == ["warning of rank 0", "warning of rank 1"]


def test_all_ranks_print_when_asked(python: str) -> None:
    with tarantella(python, "-n", "3", "--output-on-all-devices", "hello.py") as job:
        lines = job.result().stdout.splitlines()
    for rank in range(3):
        assert len([line for line in lines if line.endswith(f"hello {rank} 3")]) == 1
    assert not [line for line in lines if line.startswith("hello")]  # the rank comes first


def test_one_rank_is_a_job_like_any_other(python: str) -> None:
    with tarantella(python, "hello.py") as job:
        result = job.result()
    assert result.code == 0, result.stderr
    assert result.stdout.startswith("hello 0 1\n")


def test_options_reach_the_ranks(python: str) -> None:
    options = ["-n", "2", "--threads", "3", "-x", "GREETING=hi there"]
    with tarantella(python, *options, "hello.py") as job:
        assert job.result().stdout.splitlines()[2] == "threads 3 hi there"


def test_the_hosts_of_a_hostfile_are_used(python: str, tmp_path: pathlib.Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# this machine only\n{os.uname().nodename}\n")
    with tarantella(python, "--hostfile", str(hosts), "hello.py") as job:
        result = job.result()
    assert result.code == 0, result.stderr
    assert not list(pathlib.Path(__file__).with_name("scripts").glob(".tarantella-*"))
