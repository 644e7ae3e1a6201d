"""The package as a whole: what it offers, what it loads, what it ships."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import tarantella_pp as tnt
from tests.helpers.commands import HEAVY, all_loaded_by

ROOT = Path(__file__).parent.parent
LIGHT = ("cli.main", "partition.cut", "partition.plan.report", "runtime.comm.communicator")
"""Modules that load all of plans, schedules and ranks."""


def loaded_by(code: str) -> set[str]:
    return {name.split(".")[0] for name in all_loaded_by(code)}


def test_the_top_level_loads_nothing_heavy_in_a_blink():
    few = 40  # modules of the standard library; 0.02 s. Version look-ups alone would load 100
    loaded = all_loaded_by("import tarantella_pp; dir(tarantella_pp)") - all_loaded_by("pass")
    assert len(loaded) < few
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | {"numpy", "rich"})


def test_plans_schedules_and_ranks_load_nothing_heavy():
    loaded = loaded_by("".join(f"import tarantella_pp.{name}\n" for name in LIGHT))
    assert not loaded & HEAVY


def test_help_on_the_command_line_loads_nothing_heavy():
    code = """
from tarantella_pp.cli.main import main
for words in ("", "run", "plan make", "checkpoint show"):
    for option in ["--help"] + ["--version"] * (not words):
        try:
            main([*words.split(), option])
        except SystemExit as end:
            if end.code:
                raise
"""
    assert not loaded_by(code) & (HEAVY | {"numpy", "rich", "msgspec", "psutil"})


def test_a_process_alone_needs_no_mpi_and_is_the_master_rank():
    code = "import tarantella_pp as tnt; tnt.init(); tnt.barrier(); tnt.is_master_rank()"
    assert "mpi4py" not in loaded_by(code)
    assert (tnt.get_rank(), tnt.get_size(), tnt.get_master_rank()) == (0, 1, 0)
    assert tnt.is_master_rank()


@pytest.mark.keras
def test_every_public_name_is_there_and_has_a_docstring():
    assert dir(tnt) == sorted(tnt.__all__)  # and nothing of how it loads them
    names = [name for name in tnt.__all__ if name != "__version__"]
    assert [name for name in names if not (getattr(tnt, name).__doc__ or "").strip()] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'tarantella_pp' has no attribute 'PipelinModel'"):
        _ = tnt.PipelinModel


def test_the_version_is_that_of_the_project_file_and_of_the_change_log():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tnt.__version__ == metadata.version("tarantella-pp") == project["version"]
    change_log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(project['version'])}\]", change_log, re.MULTILINE)
    assert f"version: {project['version']}\n" in citation
    recipe = (ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8")
    assert f'version: "{project["version"]}"\n' in recipe
    assert [*(ROOT / "packaging").glob(f"tarantella_pp-{project['version']}-*.eb")]


def test_type_checkers_know_every_public_name():
    folder = Path(tnt.__file__).parent
    assert (folder / "py.typed").is_file()
    stub = (folder / "__init__.pyi").read_text(encoding="utf-8")
    assert {*re.findall(r" as (\w+)|^(__\w+__): ", stub, re.MULTILINE)} == {
        ("", name) if name.startswith("__") else (name, "") for name in tnt.__all__
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone has the links")
def test_the_rooms_can_be_entered_at_the_root():
    for room in ("partition", "runtime"):
        assert (ROOT / room).resolve() == ROOT / "tarantella_pp" / room
