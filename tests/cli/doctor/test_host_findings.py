"""What is wrong with hosts, from what they have said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tarantella_pp.cli.doctor.host_findings import host_findings, usable
from tarantella_pp.cli.doctor.host_survey import HostFacts

VERSIONS: dict[str, str | None] = {
    "python": "3.11.7",
    "tarantella_pp": "0.2.0",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "MPI": "MPICH 5.0.2",
}
HERE = HostFacts("a", name="a", versions=VERSIONS, cores=4, gpus=0, ahead=0.0)
RIGHT = replace(HERE, host="b", name="b")


def without(**versions: str | None) -> HostFacts:
    return replace(RIGHT, versions={**VERSIONS, **versions})


def test_nothing_is_wrong_with_hosts_that_agree() -> None:
    other = replace(without(python="3.11.9"), ahead=-0.3, slots=4)
    assert host_findings(HERE, [HERE, other]) == []
    assert [host.host for host in usable(HERE, [HERE, other])] == ["a", "b"]


@pytest.mark.parametrize(
    ("host", "told", "is_usable"),
    [
        (without(tarantella_pp="0.1.0"), "Host b has tarantella_pp 0.1.0, this one 0.2.0:", True),
        (without(python="3.12.1"), "Host b has python 3.12.1, this one 3.11.7: name one", True),
        (without(MPI="Open MPI v5"), "Host b has Open MPI v5, this one MPICH 5.0.2: ranks", False),
        (without(MPI=None), "Host b has no MPI: install it there: mpi4py and an MPI", False),
        (without(keras=None), "Host b has no keras: install it there: `pip install", True),
        (
            replace(RIGHT, versions={"tarantella_pp": "0.0.9"}, is_old=True, ahead=None),
            "Host b has tarantella_pp 0.0.9, this one 0.2.0, which is newer: install",
            False,
        ),
        (
            replace(RIGHT, versions={"tarantella_pp": None}, is_old=True),
            "Host b has tarantella_pp of an unknown version, this one 0.2.0",
            False,
        ),
        (HostFacts("b", silence="Host b does not answer: why."), "Host b does not answer", False),
        (replace(RIGHT, obstacles=("10.0.0.1 port 7: no",)), "Host b cannot reach the la", False),
        (replace(RIGHT, has_folder=False), "Host b has no folder like the one", False),
        (replace(RIGHT, ahead=61.2), "The clock of host b is 61 s ahead of that of this", True),
        (replace(RIGHT, ahead=-90.0), "The clock of host b is 90 s behind that of this", True),
        (replace(RIGHT, slots=8), "Host b has 4 cores for 8 ranks: give its line fewer", True),
    ],
)
def test_one_thing_that_is_wrong_is_told(host: HostFacts, told: str, is_usable: bool) -> None:
    [finding] = host_findings(HERE, [HERE, host])
    assert finding.startswith(told)
    assert finding.endswith(".")
    assert [host.host for host in usable(HERE, [HERE, host])] == ["a", "b"][: 1 + is_usable]


def test_a_host_with_two_lines_is_used_once() -> None:
    hosts = [HERE, replace(RIGHT, name="a")]
    [finding] = host_findings(HERE, hosts)
    assert finding.startswith("Hosts a, b say that their name is a: give one host one line")
    assert usable(HERE, hosts) == [HERE]


def test_hosts_are_compared_with_each_other_where_the_launcher_has_no_tensorflow() -> None:
    here = replace(HERE, versions={**VERSIONS, "tensorflow": None})
    hosts: list[Any] = [RIGHT, replace(without(tensorflow="2.20.0"), host="c", name="c")]
    [finding] = host_findings(here, hosts)
    assert finding.startswith("Host c has tensorflow 2.20.0, host b 2.21.0: install")


def test_gpus_that_some_hosts_lack_or_have_too_few_of_are_told() -> None:
    one, none = replace(RIGHT, gpus=1, slots=2), replace(RIGHT, host="c", name="c")
    few, missing = host_findings(HERE, [one, none])
    assert few.startswith("Host b has 1 GPU for 2 ranks, which need --share-gpus")
    assert missing.startswith("No GPU on c, but on other hosts")
