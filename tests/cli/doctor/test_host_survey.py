"""Hosts whose shell or whose version of this package says what nobody expects."""

from __future__ import annotations

import json
import sys

import pytest

from tarantella_pp.cli.doctor import host_survey
from tarantella_pp.launch.hosts import Host

ANSWER = {"name": "alpha", "reasons": [], "versions": {"python": "3.11.7"}, "cores": 2, "gpus": 0}


def heard(said: str) -> host_survey.HostFacts:
    """What is known of a host that prints this, whatever it is asked."""
    shell = [sys.executable, "-c", f"print({said!r})"]
    return host_survey.survey([Host("alpha.invalid", 2)], shell, [sys.executable])[0]


@pytest.mark.parametrize("more", ["", "\n3", "\nConnection closed."])
def test_an_answer_is_found_among_other_lines(more) -> None:
    found = heard(f"Welcome!\n{json.dumps(ANSWER)}{more}")
    assert (found.silence, found.name, found.cores) == ("", "alpha", 2)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Welcome!", "no answer in what it has printed"),
        ("[1]", "no answer in what it has printed"),
        (json.dumps({**ANSWER, "versions": [3, 11]}), "does not understand"),
        (json.dumps({**ANSWER, "versions": {"python": 3}}), "does not understand"),
        (json.dumps({**ANSWER, "cores": "2"}), "does not understand"),
        (json.dumps({**ANSWER, "time": "noon"}), "does not understand"),
    ],
)
def test_what_is_no_answer_is_told_of_its_host(said, told) -> None:
    found = heard(said)
    assert found.silence.startswith("Host alpha.invalid of --hostfile does not answer: ")
    assert told in found.silence
