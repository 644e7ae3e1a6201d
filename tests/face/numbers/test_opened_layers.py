"""Layers and subclassed models that are opened train as in plain Keras, to the last digits."""

import functools
import re
from collections import Counter

import keras
import numpy as np
import pytest

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.partition.graph.keras_reader import extract
from tests.helpers import training
from tests.helpers.mpi import mpi_run
from tests.helpers.training import ROUNDING, Case, X, Y, distance, evenly, finish, make, regression
from tests.zoo import opened
from tests.zoo.models import chain

pytestmark = pytest.mark.keras

IDS = training.integers(7, 5, seed=3)
OPENED = {
    "encoder": evenly(Case(opened.encoder, IDS, training.integers(7, seed=8), training.logits)),
    "halved": evenly(Case(opened.halved, X, training.floats(6, seed=2), regression())),
    "deaf": evenly(Case(opened.deaf, X, [Y, Y], regression())),
    "told": evenly(Case(opened.told, IDS, Y, regression())),
    "twice": evenly(Case(opened.twice, training.floats(5, 4), Y, regression())),
}


@functools.cache
def plain(name):
    return outcome(name, make(OPENED[name]))


def outcome(name, model):
    """Most are trained only: to evaluate and to predict is traced for each stage again."""
    return (finish if name in ("deaf", "halved", "encoder") else training.fitted)(
        model, OPENED[name]
    )


@pytest.mark.parametrize(
    ("name", "stages"),
    [("deaf", 2), ("halved", 3), pytest.param("told", 4, marks=pytest.mark.slow)],
)
def test_parts_of_layers_train_like_the_whole(name, stages):
    model = make(OPENED[name], num_stages=stages, num_micro_batches=2)
    pairs = zip(model.plan.node_names, model.plan.assignment, strict=True)
    assert len({stage for node, stage in pairs if "/" in node}) > 1  # it is cut inside of a layer
    assert distance(plain(name), outcome(name, model)) < ROUNDING


@pytest.mark.slow
def test_one_operation_is_told_no_more_of_training_than_by_keras():
    wrap = functools.partial(tnt.Model, inputs=keras.Input((6,)), num_micro_batches=2)
    model = training.begun(opened.Deaf, wrap, **OPENED["deaf"].compiled())
    assert distance(plain("deaf"), outcome("deaf", model)) < ROUNDING


def on_ranks(path):
    """Trains a model that no rank has all of, and saves it."""
    training.use_float64()
    case = OPENED["encoder"]
    keras.utils.set_random_seed(1)
    model = tnt.PipelineModel(case.build, num_stages=2, num_micro_batches=2)
    model.compile(**case.compiled())
    outcome = finish(model, training.data_of_rank(case))
    model.save(path)
    return outcome


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_have_their_parts_of_a_layer_only_and_write_one_file(tmp_path):
    path = str(tmp_path / "model.keras")
    case, reference = OPENED["encoder"], plain("encoder")
    for outcome in mpi_run(2, on_ranks, path, timeout=240).check().results:
        assert distance(reference, outcome) < ROUNDING
    kinds = {kind.__name__: kind for kind in (opened.Block, opened.Encoder, opened.Tokens)}
    loaded = keras.models.load_model(path, kinds)
    assert distance(reference["predictions"], loaded.predict(case.x, verbose=0).tolist()) < ROUNDING


def in_two_phases(model):
    """Trains all of a model, then not what is in a block before its second norm."""
    case = OPENED["twice"]
    found = [training.fitted(model, case, epochs=1)]
    block = next(layer for layer in model.layers if layer.name == "block")
    for part in (block.norms[0], block.attention):
        part.trainable = False
    model.compile(**case.compiled())
    return [*found, training.fitted(model, case, epochs=1)]


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_layers_stay_opened_where_others_are_trained_later(tmp_path):
    plan = tnt.make_plan(opened.twice(), 3, num_micro_batches=1)
    assert sum("/" in name for name in plan.node_names) > 4
    plan.save(tmp_path / "plan.json")
    model = make(OPENED["twice"], plan=tmp_path / "plan.json")  # which opens the same layers again
    assert model.plan.assignment == plan.assignment
    assert distance(in_two_phases(make(OPENED["twice"])), in_two_phases(model)) < ROUNDING


def test_layers_are_opened_only_where_that_helps_and_stay_as_they_are():
    model, call = opened.twice(), keras.layers.Layer.__call__
    nodes = [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    before = model.get_weights()
    closed = extract(model)
    assert [call.name for call in closed.calls if call.kind == "Block"] == ["block", "block:1"]
    assert all(node.flops_source == "analytic" for node in closed.graph.nodes)
    finest = closed.at_level(12)
    assert list(map(id, finest.variables)) == list(map(id, closed.variables))  # in checkpoints
    assert finest.looked.readings[0] is closed
    assert [len(layer._inbound_nodes) for layer in model._flatten_layers()] == nodes
    assert keras.layers.Layer.__call__ is call
    assert all(map(np.array_equal, before, model.get_weights()))
    parts = sum(node.flops for node in finest.graph.nodes)
    assert parts == pytest.approx(sum(node.flops for node in closed.graph.nodes))
    assert tnt.make_plan(model, 2).node_names == tuple(call.name for call in closed.calls)
    x = keras.Input((5, 4))
    few = keras.Model(x, opened.Block(4)(opened.Block(4)(x)))
    assert len(tnt.make_plan(few, 2).node_names) > 4  # however even two of them are


class Normed(keras.layers.Layer):
    """Two layers, one with statistics; what it does is set later."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = keras.layers.Dense(4), keras.layers.BatchNormalization()
        self.twice = False

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x):
        y = self.dense(x)
        return self.norm(self.dense(y) if self.twice else y)


def test_layers_without_values_are_opened_and_those_that_do_the_same_are_looked_into_once():
    with only_shapes():
        blocks = [Normed() for _ in range(4)]
        blocks[2].twice = True
        x = y = keras.Input((4,))
        for block in blocks:
            y = block(y)
        read = extract(keras.Model(x, y))
    assert len(read.looked.alike) == 3  # of which the first is given no gradient
    inside = Counter(call.name.split("/")[0] for call in read.at_level(12).calls)
    assert [inside[block.name] for block in blocks] == [2, 2, 3, 2]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("random", "writes 'seed_generator"),
        ("variable", "does not only compute outside of its layers"),
        ("flag", "calls other layers .* where it does not train"),
        ("kept", "reads what is inside of 'keeps"),
        ("object", "calls 'keeps.*', which returns a SimpleNamespace, not only tensors"),
        ("rows", "makes a number of rows that depends on values"),
        ("anew", "placeholders.*'dense.*' is made anew whenever it is called"),
        ("values", "cannot be called on placeholders"),
        ("mapped", "does not use what it calls 'dense.*' for"),
        ("views", "has a row of each sample in turn in 'dense"),
    ],
)
def test_a_layer_stays_whole_where_its_inside_cannot_be_parted(how, why):
    model = chain((6,), opened.Pair(how), keras.layers.Dense(3))
    read = extract(model)
    assert [call.kind for call in read.at_level(12).calls] == ["Pair", "Dense"]
    assert re.search(why, read.kept_whole["pair"])
    with pytest.raises(ConfigurationError, match=f"at most num_stages=2.*'pair' .*{why}"):
        tnt.PipelineModel(model, num_stages=3)


def test_calls_that_draw_from_one_seed_stay_on_one_stage():
    model = chain((6,), keras.layers.Dense(6), opened.Pair("again"), keras.layers.Dense(3))
    plan = tnt.make_plan(model, 3, num_micro_batches=1)
    found = zip(plan.node_names, plan.assignment, strict=True)
    assert [stage for name, stage in found if "/dropout" in name] == [1, 1]


def test_functions_of_tensorflow_are_opened_and_keep_working():
    layer, ones = opened.Pair("function"), np.ones((1, 6))
    model = chain((6,), layer, keras.layers.Dense(3))
    names = [f"pair/{part.name}" for part in (layer.first, layer.second)]
    assert [call.name for call in extract(model).at_level(12).calls][:2] == names
    np.testing.assert_allclose(layer(ones), layer.second(layer.first(ones)))


def test_a_subclassed_model_must_have_been_called_on_symbolic_inputs():
    model = opened.Deaf()
    model(np.ones((2, 6)))
    with pytest.raises(UnsupportedModelError, match=r"Call it once: model\(keras.Input"):
        tnt.PipelineModel(model, num_stages=2)
