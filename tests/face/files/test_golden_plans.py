"""Plan files of the first format load, print and train, whatever has become of the code since.

The files in `tests/partition/golden_plans` are named after a schedule, or what else is special
about them, and the model of `tests/helpers/training.py` that they are for.
"""

import functools
import json
from pathlib import Path

import keras
import pytest

import tarantella_pp as tnt
from tests.helpers.training import BATCH, CASES, distance, make

FILES = sorted((Path(__file__).parents[2] / "partition" / "golden_plans").glob("*.json"))
OF_MODELS = [path for path in FILES if path.name.split(".")[1] in CASES]


def test_there_is_one_of_each_kind():
    kinds = {path.name.split(".")[0] for path in FILES}
    assert kinds >= {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "zb-auto"}
    assert kinds >= {"own", "found", "time", "by_hand"}


def among(said, again):
    """Whether a value is there again, perhaps with fields that are newer than it."""
    if isinstance(said, dict):
        return all(name in again and among(value, again[name]) for name, value in said.items())
    if isinstance(said, list):
        return len(said) == len(again) and all(map(among, said, again))
    return said == again


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_they_load_and_keep_all_they_say(path):
    fields = json.loads(path.read_text())
    plan = tnt.Plan.load(path)
    assert among(fields, json.loads(plan.to_json()))
    assert tnt.Plan.from_json(plan.to_json()) == plan
    assert f"{plan.num_stages} stages" in str(plan)


@pytest.mark.keras
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if p.name[:3] == "own" else pytest.mark.slow) for p in OF_MODELS],
    ids=lambda path: path.name,
)
def test_they_train_with_the_numbers_of_keras(path):
    name = path.name.split(".")[1]
    pipeline = make(CASES[name], plan=path)
    assert pipeline.plan.assignment == tnt.Plan.load(path).assignment
    assert distance(in_keras(name), two_steps(pipeline, CASES[name])) < 1e-10


@functools.cache
def in_keras(name):
    return two_steps(make(CASES[name]), CASES[name])


def two_steps(model, case):
    x, y = (
        keras.tree.map_structure(lambda array: array[:BATCH], data) for data in (case.x, case.y)
    )
    return {"logs": [model.train_on_batch(x, y) for _ in range(2)], "weights": model.get_weights()}
