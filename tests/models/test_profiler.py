"""Profiles: measured once, kept, and what plans make of them."""

import json

import keras
import msgspec
import numpy as np
import pytest
from keras import layers, ops

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.graph.placeholders import SAMPLES
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.partition.profile import NodeProfile, Profile
from tests.models.test_make_plan import tower
from tests.zoo import models

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]


@keras.saving.register_keras_serializable("tests")
class Mixer(layers.Layer):
    """A layer that plans cannot look into; its backward pass keeps three tensors."""

    def call(self, x):
        if x.shape[0] == SAMPLES[0]:
            raise ValueError("any number but that")
        return ops.sin(ops.sin(ops.sin(x)))


def made_up(model, forward, backward, rows=(8,)):
    """A profile with given seconds for each node."""
    graph = extract(model).graph
    nodes = zip(graph.nodes, forward, backward, strict=True)
    found = tuple(NodeProfile(n.name, (f,) * len(rows), (b,) * len(rows)) for n, f, b in nodes)
    return Profile(model.name, graph.fingerprint(), 1, rows, found)


def test_every_operation_is_measured_and_the_model_stays_as_it_was():
    model = models.two_in_two_out()
    data = models.batch(model)
    before = [v.numpy() for v in model.variables]
    found = tnt.profile(model, data, repeats=1, verbose=False)
    graph = extract(model).graph
    assert [node.name for node in found.nodes] == [node.name for node in graph.nodes]
    assert found.rows == (1, 4)
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


def test_a_profile_is_kept_and_taken_from_a_file(tmp_path, monkeypatch):
    model, path = tower(6), tmp_path / "profile.json"
    first = tnt.profile(model, 6, repeats=1, cache=path, verbose=False)
    assert tnt.profile(model, 6, verbose=False) is first
    assert Profile.load(path) == first
    monkeypatch.setattr("tarantella_pp.models.profiler._KNOWN", {})
    assert tnt.profile(model, 6, repeats=1, cache=path, verbose=False) == first
    other = tnt.profile(model, 7, repeats=1, cache=path, verbose=False)
    assert other.rows == (1, 7)
    assert Profile.load(path) == other
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match=r"bad\.json: This is no valid profile"):
        tnt.profile(model, 9, cache=tmp_path / "bad.json", verbose=False)


def test_layers_that_are_guessed_are_measured():
    steps = [step for _ in range(4) for step in (layers.Dense(32), Mixer())]
    model = models.chain((32,), *steps)
    found = tnt.profile(model, 8, repeats=1, verbose=False)
    guessed = tnt.make_plan(model, 2, num_micro_batches=4)
    plan = tnt.make_plan(model, 2, num_micro_batches=4, profile=found)
    assert guessed.estimated == ("Mixer",)
    assert plan.estimated == ()
    tensor = 8 * 32 * 4
    assert sum(stage.activation_bytes for stage in plan.stages) == 4 * (1 + 3) * tensor
    assert "Time is measured" in str(plan)


def test_time_is_balanced_and_simulated_as_measured():
    model = tower(6)
    times = [5e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3]
    given = {"num_micro_batches": 4, "balance": "time", "profile": made_up(model, times, times)}
    plan = tnt.make_plan(model, 2, **given)
    assert plan.assignment == (0, 1, 1, 1, 1, 1)
    assert plan.certificate.optimal
    assert plan.certificate.value == pytest.approx(10e-3)
    assert [stage.seconds for stage in plan.stages] == pytest.approx([10e-3, 10e-3])
    assert "largest stage 0.01 s per micro-batch" in " ".join(str(plan).split())
    step = PlanSimulation(plan, tnt.HardwareSpec(bandwidth=1e30, latency=0.0), "1f1b", 4).step()
    assert step.step_seconds == pytest.approx((4 + 1) * 10e-3)
    assert type(plan).from_json(plan.to_json()) == plan
    repeated = tnt.make_plan(model, 2, **given, recompute="all")
    assert repeated.certificate.value == pytest.approx((10 + 5) * 1e-3)


def test_seconds_between_and_beyond_measured_sizes():
    found = made_up(tower(1), [0.0], [0.0], rows=(2, 4))
    node = NodeProfile("dense", (3.0, 5.0), (4.0, 2.0))
    found = msgspec.structs.replace(found, nodes=(node,))
    assert found.seconds(4) == ((5.0, 2.0),)
    assert found.seconds(8) == ((9.0, 2.0),)
    assert found.seconds(3)[0][0] == 4.0
    one = msgspec.structs.replace(found, rows=(2,), nodes=(NodeProfile("dense", (3.0,), (4.0,)),))
    assert one.seconds(4) == ((6.0, 8.0),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [4, 2]}, "ascending"),
        ({"nodes": [{"name": "a", "forward": [], "backward": [1.0]}]}, "nodes.0."),
        ({"extra": 1}, "unknown field"),
    ],
)
def test_broken_profiles_are_refused(tmp_path, change, message):
    path = tmp_path / "profile.json"
    made_up(tower(1), [1.0], [1.0]).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PlanError, match=message):
        Profile.load(path)


def test_what_cannot_work_is_refused():
    found = made_up(tower(3), [1.0] * 3, [1.0] * 3)
    with pytest.raises(PlanError, match="profile of another model, 'tower' with 3 operations"):
        tnt.make_plan(tower(4), 2, profile=found)
    with pytest.raises(ConfigurationError, match="batch=0"):
        tnt.profile(tower(6), 0)
    with pytest.raises(ConfigurationError, match="repeats=0"):
        tnt.profile(tower(6), 1, repeats=0)
