"""Each kind of layer in a stage of its own: forward, B and W against a gradient tape."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.runtime.stage.graph_split import CutError
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries

pytestmark = pytest.mark.keras

ROWS = (4, 3)  # the first size is compiled by itself, all others together
ALIKE = (4, 4)  # where that is not what is tested


@contextlib.contextmanager
def in_precision(floatx, policy):
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def attention(x):
    return layers.MultiHeadAttention(2, 3, dropout=0.2, seed=1)(x, x, use_causal_mask=True)


def masked(layer):
    return lambda x: layer(layers.Masking(0.0)(ops.relu(x)))


def many_ops(x):
    a = ops.matmul(x[:, :2], ops.transpose(x, (0, 2, 1)))
    b = ops.where(a > 0, a, ops.exp(a) - 1.0)
    c = ops.concatenate([ops.softmax(b), ops.stop_gradient(b)], axis=1)
    return ops.einsum("bij,bjk->bik", c, x) / (1.0 + ops.abs(ops.sum(x, 1, keepdims=True)))


def transformer(x):
    h = x + layers.MultiHeadAttention(2, 3)(layers.LayerNormalization()(x), x, x)
    return h + layers.Dense(4)(layers.Dense(8, "gelu")(layers.LayerNormalization()(h)))


def bottleneck(x):
    y = layers.Conv2D(3, 1, use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.DepthwiseConv2D(3, padding="same")(y)
    return layers.Conv2D(4, 1)(layers.BatchNormalization()(y)) + x


def flat(x):
    """Layers once and twice, frozen, random, with losses."""
    twice, drop = layers.Dense(6), layers.Dropout(0.4, seed=1)
    x = drop(ops.tanh(drop(twice(ops.tanh(twice(x))))))
    x = layers.Dense(6, "tanh", trainable=False)(layers.Dense(6, "relu")(x))
    return layers.Dense(4, activity_regularizer="l2")(x)


FLAT, SEQUENCE, IMAGE = (6,), (5, 4), (6, 6, 4)
KINDS = {
    "flat": (FLAT, flat),
    "bottleneck": (IMAGE, bottleneck),
    "attention": (SEQUENCE, lambda x: attention(transformer(x))),
    "ops": (SEQUENCE, lambda x: masked(layers.GlobalAveragePooling1D())(many_ops(x))),
    "lstm": (SEQUENCE, masked(lambda x: layers.LSTM(3, return_sequences=True)(x))),
}


def stage_of(shape, build, recompute=False):
    """The stage of `build` between two others, so that gradients come in and go out."""
    inputs = keras.Input(shape)
    outputs = layers.Dense(2, name="after")(build(layers.Dense(shape[-1], name="before")(inputs)))
    extracted = extract(keras.Model(inputs, outputs))
    places = {"before": 0, "after": 2}
    assignment = [places.get(node.name, 1) for node in extracted.graph.nodes]
    boundary = stage_boundaries(extracted.graph, assignment, 3)[1]
    return Stage(boundary, [extracted.calls[n] for n in boundary.nodes], recompute), extracted.graph


def random(rows, port, graph, rng):
    tensor = graph.tensors[port.tensor]
    shape = (rows, *tensor.shape[1:])
    if "int" in tensor.dtype:
        return tf.constant(rng.integers(0, 5, size=shape), tensor.dtype)
    return tf.cast(rng.normal(size=shape), tensor.dtype)


def micro_batches(stage, graph, sizes=ROWS):
    rng = np.random.default_rng(0)
    for rows in sizes:
        inputs = [random(rows, port, graph, rng) for port in stage.boundary.inputs]
        outputs = [random(rows, port, graph, rng) for port in stage.boundary.outputs_with_gradient]
        yield inputs, [rows / sum(sizes), *outputs]


def with_factors(stage, seeds):
    """The factor of all losses that the stage's layers added, once for each of them."""
    count = len(stage.module.added_by[True])
    return [tf.fill([count], tf.cast(seeds[0], keras.config.floatx())), *seeds[1:]]


def dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient).numpy()


def by_tape(stage, batches):
    """Outputs and input gradients of each micro-batch, and the sums of the weight gradients."""
    module = stage.module
    results, sums = [], [None] * len(module.variables)
    for inputs, seeds in batches:
        wanted = [*module.sources(inputs), *module.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(wanted)
            outputs, added = module.run(inputs, training=True)
            targets = module.targets(outputs, added)
        found = tape.gradient(targets, wanted, output_gradients=with_factors(stage, seeds))
        count = len(wanted) - len(module.variables)
        back = [tf.zeros_like(w) if g is None else g for w, g in zip(wanted, found[:count])]  # noqa: B905
        results.append([*outputs, added, *back])
        for i, gradient in enumerate(found[count:]):
            if gradient is not None:
                sums[i] = dense(gradient) + (0 if sums[i] is None else sums[i])
    return results, sums


def by_stage(stage, batches, split):
    """The same from the stage, all micro-batches in flight together."""
    found = []
    for key, (inputs, _) in enumerate(batches):
        outputs, added = stage.forward(key, inputs)
        found.append([*outputs, tf.zeros([0], keras.config.floatx()) if added is None else added])
    for key, (_, seeds) in enumerate(batches):
        seeds = with_factors(stage, seeds)
        found[key] += stage.backward_input(key, seeds) if split else stage.backward(key, seeds)
    if split:
        for key in range(len(batches)):
            stage.backward_weight(key)
    sums = stage.module.accumulator
    collected = sums.take_collected()
    totals = [dense(sums.gradient(i, collected)) for i in range(len(sums.weights))]
    sums.reset()
    return found, totals


def states(stage):
    return [v for call in stage.module.layer.calls for v in call.variables]


def compare(first, second, limit):
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
            # Some gradients are zero but for rounding, as of a bias before a normalization.
            size = max(1.0, np.max(np.abs(a), initial=0))
            assert np.max(np.abs(a - b), initial=0) <= limit * size


def check(stage, graph, limit, sizes=ROWS):
    batches = list(micro_batches(stage, graph, sizes))
    start = [v.numpy() for v in states(stage)]
    expected, sums = by_tape(stage, batches)
    end = [v.numpy() for v in states(stage)]
    for split in (False, True):
        for variable, value in zip(states(stage), start, strict=True):
            variable.assign(value)
        found, totals = by_stage(stage, batches, split)
        for one, other in zip(expected, found, strict=True):
            compare(one, other, limit)
        compare(sums, totals, limit)
        compare(end, [v.numpy() for v in states(stage)], limit)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) if k in ("attention", "lstm") else k for k in KINDS],
)
def test_kinds_of_layers(kind):
    with in_precision("float64", "float64"):
        stage, graph = stage_of(*KINDS[kind])
        check(stage, graph, 1e-12)
    assert stage.fallback is None


@pytest.mark.parametrize("kind", ["flat", "bottleneck"])
def test_a_stage_that_cannot_be_cut_runs_on_a_tape(monkeypatch, kind):
    def refuse(*_):
        raise CutError("not this one")

    monkeypatch.setattr("tarantella_pp.runtime.stage.stage.SplitBackward", refuse)
    with in_precision("float64", "float64"):
        stage, graph = stage_of(*KINDS[kind])
        check(stage, graph, 1e-12, ALIKE)
    assert stage.fallback == "not this one"


def test_a_micro_batch_keeps_the_operands_of_its_products():
    with in_precision("float64", "float64"):
        stage, graph = stage_of(FLAT, lambda x: layers.Dense(3, "relu")(layers.Dense(5, "tanh")(x)))
        inputs, _ = next(micro_batches(stage, graph))
        stage.forward(0, inputs)
    width, row = FLAT[-1], 8 * len(inputs[0])
    assert stage.residual_bytes == (width + 5 + 3) * row  # inputs of both layers, outputs of both


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bottleneck", "attention"])
def test_recomputation_repeats_random_numbers_and_statistics(kind):
    with in_precision("float64", "float64"):
        plain, _ = stage_of(*KINDS[kind])
        stage, graph = stage_of(*KINDS[kind], recompute=True)
        check(stage, graph, 1e-12, ALIKE)
        plain.forward(0, next(micro_batches(plain, graph))[0])
    kept = [s.residual_bytes for s in (plain, stage)]
    assert kept[1] < kept[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "limit"),
    [
        ("bottleneck", "float32", 2e-5),
        ("attention", "mixed_bfloat16", 5e-2),
    ],
)
def test_other_precisions(kind, policy, limit):
    # With some weights a unit of ReLU is so close to zero that rounding switches it on or off.
    keras.utils.set_random_seed(0)
    with in_precision("float32", policy):
        stage, graph = stage_of(*KINDS[kind])
        check(stage, graph, limit, ALIKE)


def test_embeddings_keep_the_slices_of_every_token():
    with in_precision("float64", "float64"):
        ids = keras.Input((5,), dtype="int32")
        x = layers.Embedding(6, 4, mask_zero=True)(ids)
        x = layers.Dense(3)(layers.MultiHeadAttention(2, 3)(x, x))
        model = keras.Model(ids, layers.Dense(2, name="after")(x))
        extracted = extract(model)
        names = [node.name for node in extracted.graph.nodes]
        boundary = stage_boundaries(extracted.graph, [int(n == "after") for n in names], 2)[0]
        stage = Stage(boundary, [extracted.calls[n] for n in boundary.nodes])
        check(stage, extracted.graph, 1e-12)
        for key, (inputs, seeds) in enumerate(micro_batches(stage, extracted.graph)):
            stage.forward(key, inputs)
            stage.backward(key, with_factors(stage, seeds))
        (found,) = stage.module.accumulator.take_collected().values()
    assert found.indices.shape == (5 * sum(ROWS),)
    assert found.values.shape == (5 * sum(ROWS), 4)


def test_a_stage_remembers_nothing_after_it_was_cleared():
    stage, graph = stage_of(*KINDS["flat"])
    (inputs, seeds), *_ = micro_batches(stage, graph)
    stage.forward(0, inputs)
    stage.forward(1, inputs)
    stage.backward(1, with_factors(stage, seeds))
    stage.clear()
    check(stage, graph, 1e-5)


def test_frozen_stages_keep_nothing_and_run_no_backward_pass():
    x = keras.Input((4,))
    y = layers.Dense(2)(layers.Dense(3, activation="tanh", trainable=False)(x))
    extracted = extract(keras.Model(x, y))
    stage = Stage(stage_boundaries(extracted.graph, (0, 1), 2)[0], extracted.calls[:1])
    stage.forward(0, [tf.ones((2, 4))])
    assert stage.residual_bytes == 0
    assert stage.backward(0, []) == []  # it asks for no gradients, where there are none
