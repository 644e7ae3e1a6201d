"""Plans and profiles on disk: the usual mode, all or nothing, and clear errors."""

import os
import stat

import pytest

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.profile import NodeProfile, Profile
from tests.helpers.plans import chain_graph, plan_of

RECORDS = [
    plan_of(chain_graph(), [0, 0, 1, 1]),
    Profile("m", "0" * 64, 1, (4,), (NodeProfile("a", (1.0,), (2.0,)),)),
]


@pytest.fixture(params=RECORDS, ids=lambda record: type(record).__name__)
def record(request):
    return request.param


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_usual_mode_and_an_old_one_keeps_its_own(record, tmp_path, mask):
    target, link = tmp_path / "a.json", tmp_path / "b.json"
    before = os.umask(mask)
    try:
        record.save(target)
    finally:
        os.umask(before)
    assert mode(target) == 0o666 & ~mask
    target.chmod(0o640)
    link.symlink_to(target)
    record.save(link)
    assert link.is_symlink()
    assert mode(target) == 0o640
    assert type(record).load(target) == record


def test_a_device_stays_one(record):
    record.save(os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_places_that_cannot_be_written_are_named(record, tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "a.json", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigurationError, match=f"Cannot write '{path}': "):
            record.save(path)
    assert os.listdir(tmp_path) == []


def test_files_that_are_not_valid_are_named(record, tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(PlanError, match=f"Cannot read the {record.noun} '{path}': No such file"):
        type(record).load(path)
    for version in ('"version": 7', '"later": 0, "version": 1'):
        path.write_text(record.to_json().replace('"version": 1', version))
        reason = rf"a\.json: This is no valid {record.noun}: .* Another version of"
        with pytest.raises(PlanError, match=reason):
            type(record).load(path)
    path.write_text("[]")
    with pytest.raises(PlanError, match=rf"a\.json: This is no valid {record.noun}: Expected"):
        type(record).load(path)
