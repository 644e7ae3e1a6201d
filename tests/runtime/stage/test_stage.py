"""Each kind of layer in stages: forward passes, B and W, cut apart or not, against Keras."""

import functools

import keras
import msgspec
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.runtime.stage import stage as stages
from tarantella_pp.runtime.stage.graph_split import CutError
from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries
from tarantella_pp.schedule import Schedule, make_schedule
from tests.helpers.training import distance, in_precision
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]


def many_ops(x):
    a = ops.matmul(x[:, :2], ops.transpose(x, (0, 2, 1)))
    b = ops.where(a > 0, a, ops.exp(a) - 1.0)
    c = ops.concatenate([ops.softmax(b), ops.stop_gradient(b)], axis=1)
    return ops.einsum("bij,bjk->bik", c, x) / (1.0 + ops.abs(ops.sum(x, 1, keepdims=True)))


def transformer(x):
    drop = layers.MultiHeadAttention(2, 3, dropout=0.2, seed=1)
    h = x + drop(layers.LayerNormalization()(x), x, use_causal_mask=True)
    return h + layers.Dense(4)(layers.Dense(8, "gelu")(layers.LayerNormalization()(h)))


def bottleneck(x):
    y = layers.Conv2D(3, 1, use_bias=False)(layers.Reshape((5, 4, 1))(x))
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.DepthwiseConv2D(3, padding="same")(y)
    return layers.Reshape((5, 4))(layers.Conv2D(1, 1)(layers.BatchNormalization()(y))) + x


def flat(x):
    """Layers once and twice, frozen, random, with losses."""
    twice, drop = layers.Dense(4), layers.Dropout(0.4, seed=1)
    x = drop(ops.tanh(drop(twice(ops.tanh(twice(x))))))
    x = layers.Dense(6, "tanh", trainable=False)(layers.Dense(6, "relu")(x))
    return layers.Dense(4, activity_regularizer="l2")(x)


def recurrent(x):
    """A loop that may draw random numbers, and one that may not."""
    x = layers.SimpleRNN(4, return_sequences=True)(layers.Masking(0.0)(ops.relu(x)))
    steps = ops.transpose(x, (1, 0, 2))
    return x + ops.scan(lambda kept, now: (ops.tanh(kept + now), now), steps[0], steps)[0][:, None]


def embedded(x):
    """A part of its own: it takes no gradient."""
    ids = layers.Embedding(6, 4, mask_zero=True)(ops.cast(ops.abs(x[..., 0]) * 3, "int32") % 6)
    return x + layers.MultiHeadAttention(2, 3)(ids, ids)


PARTS = flat, transformer, bottleneck, many_ops, recurrent, embedded
WITH_STATE = flat, bottleneck, recurrent
"""Random numbers, statistics and a loop: what must not differ when it runs again."""
IN_HALF = transformer, bottleneck
"""Keras itself trains no more in half precision."""


@functools.cache
def plain(policy, parts):
    return trained(whole(parts))


def whole(parts=IN_HALF):
    keras.utils.set_random_seed(1)
    steps = [step for part in parts for step in (layers.Dense(4), part)]
    return chain((5, 4), *steps, layers.GlobalAveragePooling1D(), layers.Dense(2))


def trained(model):
    """Two steps, of which the second depends on statistics, seeds and what the first left."""
    eagerly = not isinstance(model, PipelineModel)
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=eagerly)
    x, y = np.random.default_rng(0).normal(size=(4, 5, 4)), np.ones((4, 2))
    found = [*(model.train_on_batch(x, y) for _ in range(2)), *model.get_weights()]
    return np.concatenate([np.ravel(each).astype("float64") for each in found])


@pytest.mark.parametrize(
    ("parts", "policy", "schedule", "recompute", "limit"),
    [
        (PARTS, "float64", "zb-h1", "none", 1e-13),
        pytest.param(WITH_STATE, "float64", "1f1b", [0, 1], 1e-13, marks=pytest.mark.slow),
        pytest.param(IN_HALF, "mixed_bfloat16", "1f1b", "none", 5e-2, marks=pytest.mark.slow),
        pytest.param(WITH_STATE, "float64", "on a tape", "none", 1e-13, marks=pytest.mark.slow),
    ],
)
def test_the_gradients_are_those_of_keras(parts, policy, schedule, recompute, limit, monkeypatch):
    """B and W apart and together, with the forward pass repeated, and where no graph is cut."""
    taped = schedule == "on a tape"

    def refuse(*_):
        raise CutError("not this one")

    if taped:
        monkeypatch.setattr(stages, "SplitBackward", refuse)
    with in_precision("float64" if policy == "float64" else "float32", policy):
        options = {"schedule": None if taped else schedule, "recompute": recompute}
        model = PipelineModel(whole(parts), 3, num_micro_batches=1, **options)
        assert distance(plain(policy, parts), trained(model)) < limit
    reasons = {text.partition(": ")[2] for text in model.plan.fallbacks}
    assert reasons == ({"not this one"} if taped else set())


def test_what_runs_again_changes_no_bit():
    """In the stages of a pipeline, in float32: kept, cheap operations again, some, and all.

    The last ones run by an R, before they are asked for: B and W are left with their own work.
    """
    found = []
    with in_precision("float32", "float32"):
        for recompute in ("none", None, "some", "all", "early"):
            options = {"num_stages": 2, "num_micro_batches": 2, "recompute": recompute}
            if recompute == "early":
                early = make_schedule("zb-h1", 2, 2).repeating({(0, 1), (1, 0), (1, 1)})
                own = Schedule.from_text(early.to_text())
                options |= {"recompute": "all", "schedule": own}
            if recompute == "some":
                plan = PipelineModel(whole(), **options | {"recompute": "all"}).plan
                worth = tuple(1e3 * (node % 3) for node in range(len(plan.assignment)))
                options = {"plan": msgspec.structs.replace(plan, recompute_worth=worth)}
            model = PipelineModel(whole(), **options)
            found.append(trained(model))
            stages_ = model._engine.stages.values()
            found[-1] = found[-1], sum(stage.residual_bytes or 0 for stage in stages_)
        repeating = [work for stage in stages_ for work in stage.passes]
    (values, kept), *others = found
    for other, less in others:
        np.testing.assert_array_equal(values, other)
        assert less < 0.8 * kept
    for work in repeating:
        usual, early = work._kept, work._whole
        both = [[p.both] if "both" in vars(p) else [p.of_inputs, p.of_weights]
                for p in (usual, early)]  # fmt: skip
        with_forward, own, forward = map(products, (*both, [work._repeat]))
        assert with_forward == own + forward > own
        # R leaves what a stage keeps that does not recompute.
        assert usual.residual_bytes < 0.8 * early.residual_bytes


def products(functions):
    nodes = [node for one in functions for node in one._call.__self__.definition.node_def]
    return sum(any(kind in node.op for kind in ("MatMul", "Conv", "Einsum")) for node in nodes)


def test_frozen_stages_keep_nothing_and_others_the_operands_of_their_products():
    frozen = layers.Dense(3, activation="tanh", trainable=False)
    rest = layers.Dense(5, "tanh"), layers.Dense(3, "relu"), layers.Dense(2)
    extracted = extract(chain((4,), frozen, *rest))
    boundaries = stage_boundaries(extracted.graph, (0, 1, 1, 2), 3)
    first, second = (stages.Stage(b, [extracted.calls[n] for n in b.nodes]) for b in boundaries[:2])
    outputs, _ = first.forward(0, [tf.ones((2, 4))])
    assert first.residual_bytes == 0
    assert first.backward(0, []) == []  # it asks for no gradients, where there are none
    second.forward(0, outputs)
    assert second.residual_bytes == (3 + 5 + 3) * 4 * 2  # inputs of both layers, outputs of both
