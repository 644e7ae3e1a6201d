"""What hosts are asked before a job starts on them."""

from __future__ import annotations

import pathlib

import pytest

from tarantella_pp.launch import remote_hosts

COUNTED = """
touch {folder}/$$; ls {folder} | wc -l >> {peaks}
sleep 0.2; rm {folder}/$$; echo '{{"name": "{name}"}}'
"""


def test_a_thousand_hosts_are_asked_in_turns(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_hosts, "MOST_AT_ONCE", 3)
    (folder := tmp_path / "running").mkdir()
    names, peaks = [f"host{i}" for i in range(8)], tmp_path / "peaks"
    commands = {
        name: ["sh", "-c", COUNTED.format(folder=folder, peaks=peaks, name=name)] for name in names
    }
    found = {answer.host: answer.found for answer in remote_hosts.answers_of(commands)}
    assert found == {name: {"name": name} for name in names}
    running = [int(line) for line in peaks.read_text().split()]
    assert len(running) == 8
    assert 1 < max(running) <= 3


def test_a_host_that_is_silent_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_hosts, "LIMIT_SECONDS", 0.5)
    commands = {"dead": ["sleep", "60"], "alive": ["echo", "{}"], "wrong": ["sh", "-c", "exit 3"]}
    answers = {answer.host: answer for answer in remote_hosts.answers_of(commands)}
    assert answers["alive"].found == {}
    assert answers["dead"].why == "no answer within 0.5 s"
    assert answers["wrong"].why == "exit code 3"
