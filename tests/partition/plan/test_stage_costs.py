import math
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from keras import optimizers as opt

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.graph.layer_graph import Weight
from tarantella_pp.partition.graph.least_kept import FLOPS_PER_BYTE
from tarantella_pp.partition.graph.optimizer_slots import optimizer_name, optimizer_state_bytes
from tarantella_pp.partition.plan.plan_simulation import searched, with_findings
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries
from tarantella_pp.schedule import HeldAgain
from tests.helpers.plans import costs_of
from tests.zoo import models
from tests.zoo.models import chain

pytestmark = pytest.mark.keras


def attention(**kwargs):
    layer = layers.MultiHeadAttention(2, 8, **kwargs)
    return chain((6, 16), start(), lambda x: layer(x, x))


def start():
    """Trains, so that gradients flow through all steps behind it."""
    return layers.Dense(16)


def image(*steps):
    return chain((8, 8, 4), layers.Conv2D(4, 3, padding="same"), *steps)


RULES = {
    **{
        name: (lambda name=name: chain((6, 16), start(), layers.Activation(name)))
        for name in (
            *("relu", "relu6", "leaky_relu", "elu", "selu", "softplus", "tanh", "sigmoid", "silu"),
            *("gelu", "softmax", "exponential", "softsign"),
        )
    },
    **{
        f"dense {name}": (lambda name=name: chain((16,), layers.Dense(8, name), layers.Dense(4)))
        for name in ("relu", "gelu")
    },
    "conv": lambda: image(layers.Conv2D(4, 3, activation="relu")),
    "depthwise": lambda: image(layers.DepthwiseConv2D(3, activation="relu")),
    "transposed": lambda: image(layers.Conv2DTranspose(6, 3)),
    "batch norm": lambda: image(layers.BatchNormalization()),
    "layer norm": lambda: chain((64, 16), start(), layers.LayerNormalization()),
    "group norm": lambda: image(layers.GroupNormalization(2)),
    "dropout": lambda: chain((6, 16), start(), layers.Dropout(0.5, seed=1)),
    "max pooling": lambda: image(layers.MaxPooling2D()),
    "embedding": lambda: chain((9,), layers.Embedding(11, 16), start(), dtype="int32"),
    "attention": attention,
    "attention with dropout": lambda: attention(dropout=0.1, seed=2),
    "reshapes": lambda: chain((8, 8), layers.Dense(8), layers.Flatten(), layers.Dense(3)),
    "padding": lambda: image(layers.ZeroPadding2D(), layers.Conv2D(3, 3)),
    "product": lambda: chain((6, 16), start(), lambda x: x * ops.sigmoid(x)),
    "matmul": lambda: chain((6, 16), start(), lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1)))),
    "slices": lambda: chain((6, 16), start(), lambda x: ops.concatenate([x[:, :2], x[:, 3:]], 1)),
    "tied head": models.tied_head,
    "tied variable": models.tied_variable,
    "mlp": models.mlp,
    "residual cnn": models.batch_norm_cnn,
}


def traced_bytes(extracted, rows, flops_per_byte):
    """Bytes that a stage with the whole model really keeps of a micro-batch."""
    graph = extracted.graph
    (layout,) = stage_boundaries(graph, [0] * len(graph.nodes), 1)
    stage = Stage(layout, extracted.calls, [flops_per_byte] * len(graph.nodes))
    tensors = [graph.tensors[port.tensor] for port in layout.inputs]
    stage.forward(0, [tf.ones((rows, *t.shape[1:]), t.dtype) for t in tensors])
    return stage.residual_bytes


@pytest.mark.parametrize("name", RULES)
def test_rules_say_what_a_traced_backward_pass_keeps(name):
    extracted = extract(RULES[name]())
    graph, rows = extracted.graph, 4
    assert {node.residual_source for node in graph.nodes} == {"analytic"}
    every = []
    for worth in (0.0, FLOPS_PER_BYTE):
        (stage,) = costs_of(graph, rows, flops_per_byte=worth).stages([0] * len(graph.nodes))
        kept = traced_bytes(extracted, rows, worth)
        assert stage.activation_bytes == pytest.approx(kept, rel=0.12, abs=100), worth
        every.append(kept)
    assert every[1] <= every[0]


def test_a_stage_that_makes_all_again_does_so_part_by_part():
    convolutions = [layers.Conv2D(4, 3, padding="same", activation="relu") for _ in range(40)]
    extracted = extract(chain((8, 8, 4), *convolutions))
    (stage,) = costs_of(extracted.graph, 4, flops_per_byte=math.inf).stages([0] * 40)
    kept, one = traced_bytes(extracted, 4, math.inf), 4 * 8 * 8 * 4 * 4
    assert 3 * one <= kept <= 8 * one
    assert stage.activation_bytes == pytest.approx(kept, abs=one)


OPTIMIZERS = {
    "sgd": (opt.SGD(), 0),
    "adam": (opt.Adam(), 2),
    "amsgrad": (opt.Adam(amsgrad=True), 3),
    "rmsprop": (opt.RMSprop(centered=True, momentum=0.5), 3),
    "lion": (opt.Lion(), 1),
    "accumulation": (opt.SGD(gradient_accumulation_steps=2), 1),
    "scaled": (opt.LossScaleOptimizer(opt.Adam()), 2),
    "named": ("adagrad", 1),
    "none": (None, 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_are_those_of_the_optimizer(name):
    optimizer, slots = OPTIMIZERS[name]
    weights = extract(models.batch_norm_cnn()).graph.weights
    found = optimizer_state_bytes(optimizer, weights)
    assert found == tuple(slots * w.bytes if w.trainable else 0 for w in weights)
    if isinstance(optimizer, opt.Optimizer):
        assert not optimizer.built


def test_factored_slots_have_the_shape_of_the_real_variable():
    weight = Weight(0, "a/kernel", (7, 4, 100), "float32", True, 11200)
    factored = (7 * 4 + 7 * 100) * 4
    built = opt.Adafactor()
    built.build([keras.Variable(np.zeros(weight.shape, "float32"))])
    real = sum(4 * int(np.prod(v.shape)) for v in built.variables if len(v.shape) > 0)
    assert real == 11200 + factored
    assert optimizer_state_bytes(opt.Adafactor(), [weight]) == (real,)


def test_an_unknown_optimizer_is_refused():
    for wrong in ("adamm", 3, keras.layers.Dense(2)):
        with pytest.raises(ConfigurationError, match="Received: optimizer="):
            optimizer_state_bytes(wrong, [])
    assert optimizer_name("adam") == "Adam"
    assert optimizer_name(None) == "Adam (assumed)"


@pytest.mark.parametrize("name", ["mlp", "tied head", "residual cnn"])
def test_shared_optimizer_state_is_that_of_the_fullest_replica(name):
    graph = extract(RULES[name]()).graph
    cut = [int(node.id >= len(graph.nodes) // 2) for node in graph.nodes]
    for assignment, held in (([0] * len(cut), [1]), (cut, [2, 1])):
        whole = costs_of(graph, 2, held).stages(assignment)
        costs = costs_of(graph, 2, held, replicas=2, shard_optimizer=True)
        for stage, before in zip(costs.stages(assignment), whole, strict=True):
            half = before.optimizer_bytes / 2
            assert half <= stage.optimizer_bytes <= max(4 / 3 * half, max(costs.slots, default=0))


def test_cuts_carry_skips():
    graph = extract(models.one_skip()).graph
    costs = costs_of(graph, 2, [3, 2, 1])
    cuts = costs.cuts([0, 1, 1, 2, 2])
    assert [(cut.source, cut.targets) for cut in cuts] == [(0, (1, 2)), (1, (2,))]
    assert cuts[0].bytes == 2 * 6 * 4
    assert all(cut.has_gradient for cut in cuts)
    stages = costs.stages([0, 1, 1, 2, 2])
    # One message ahead, the gradients in use, and the skip, which the last stage does not keep.
    assert [stage.buffer_bytes for stage in stages] == [48 + 96, 48 + 48, 48 + 48]


def test_gradients_of_products_wait_for_their_w():
    graph = extract(chain((64,), *map(layers.Dense, [64] * 4))).graph
    costs = costs_of(graph, 512, [3, 3])
    waiting = replace(costs, held_again=[HeldAgain(3, False)] * 2)
    pairs = [one.stages([0, 0, 1, 1]) for one in (costs, waiting)]
    # The first stage has no B.
    assert [b.memory_bytes - a.memory_bytes for a, b in zip(*pairs, strict=True)] == [0, 1 << 19]


def test_a_search_for_a_schedule_counts_what_waits():
    options = {"num_stages": 4, "num_micro_batches": 16, "batch_size": 8192, "num_ranks": 4}
    model = chain((64,), *(layers.Dense(64, "tanh") for _ in range(8)))
    plan = tnt.make_plan(model, schedule="zb-auto", memory_limit=6_000_000, **options)
    found = with_findings(plan, searched(plan, plan.schedule_spec(), 16), {})
    for stage in found.stages[1:]:
        waiting = 2 * 512 * 64 * 4  # two products
        assert stage.in_flight * (stage.activation_bytes + waiting) < 6_000_000
        assert stage.memory_bytes <= 6_000_000
