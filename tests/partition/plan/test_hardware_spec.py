"""Seconds of operations by arithmetic and memory traffic, and machines by name."""

from __future__ import annotations

import keras
import msgspec
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.plan.hardware_spec import (
    HardwareSpec,
    LayerSpeed,
    NodeWork,
    PassSpeed,
    machine_of,
    node_work,
    roofline_seconds,
)
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation, stage_seconds
from tests.helpers.commands import Command
from tests.zoo import models
from tests.zoo.published_models import amoebanet, resnet101, unet

pytestmark = pytest.mark.keras
ZERO, ONE = '{"flops_per_second": 0}', '{"flops_per_second": 1}'


def work_of(*stack, shape=(6,), dtype="float32"):
    """Work of layers that are followed by another one, which has the loss."""
    x = inputs = keras.Input(shape, dtype=dtype)
    for layer in (*stack, layers.Rescaling(2.0)):
        x = layer(x)
    return node_work(extract(keras.Model(inputs, x)).graph)[:-1]


def test_what_moves():
    dense, relu = work_of(layers.Dense(4), layers.ReLU())
    assert dense == NodeWork(2 * 6 * 4 + 4, 4 * (6 + 4), 4 * (6 * 4 + 4), "product")
    assert relu == NodeWork(4, 4 * (4 + 4), 0, "function", 4)
    flat = work_of(layers.Dense(4), layers.Flatten(), shape=(3, 6))[1]
    assert flat == NodeWork(0, 0, 0)  # the same memory
    (table,) = work_of(layers.Embedding(1000, 8), shape=(5,), dtype="int32")
    assert table == NodeWork(
        0, 4 * (2 * 5 + 2 * 5 * 8), 0, "function"
    )  # no more of it than is picked


class DepthwiseConvolution(layers.Layer):
    """A user's layer, named as if it were one of Keras, without a window."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        return x @ self.kernel


@pytest.mark.parametrize(
    ("layer", "kind", "functions"),
    [
        (DepthwiseConvolution(), "depthwise", 0),
        (layers.Conv2D(2, 3, activation="silu"), "convolution", 5 * 2 * 2 * 2),
        (layers.SeparableConv2D(2, 3), "pointwise", 0),
        (layers.Conv2D(2, 1), "pointwise", 0),
        (layers.Conv2DTranspose(2, 1), "pointwise", 0),
        (layers.DepthwiseConv2D(3), "depthwise", 0),
        (layers.DepthwiseConv2D((1, 4)), "large_depthwise", 0),
        (layers.BatchNormalization(), "normalization", 0),
        (layers.Activation("gelu"), "function", 10 * 4 * 4 * 4),
        (layers.EinsumDense("abcd,de->abce", (4, 4, 8)), "product", 0),
        (layers.LayerNormalization(), "function", 0),
        (layers.ZeroPadding2D(), "function", 0),
    ],
)
def test_kinds_of_layers(layer, kind, functions):
    (work,) = work_of(layer, shape=(4, 4, 4))
    assert (work.kind, work.function_flops) == (kind, functions)


def test_softmax_of_attention_is_a_function():
    x = keras.Input((6, 8))
    y = layers.Rescaling(2.0)(layers.MultiHeadAttention(2, 4)(x, x))
    work, _ = node_work(extract(keras.Model(x, y)).graph)
    assert (work.kind, work.function_flops) == ("product", 5 * 2 * 6 * 6)


def test_the_longer_of_both_counts():
    work = (NodeWork(100.0, 1.0, 0.0), NodeWork(1.0, 40.0, 80.0))
    assert roofline_seconds(work, 2, HardwareSpec(10.0)) == [(20.0, 40.0), (0.2, 0.4)]
    machine = HardwareSpec(10.0, memory_bandwidth=4.0)
    moved = (2 * 40 + 80) / 4
    assert roofline_seconds(work, 2, machine) == [(20.0, 40.0), (moved, 2 * moved)]
    moved = (40 + 80) / 4  # weights come anew
    assert roofline_seconds(work, 1, machine) == [(10.0, 20.0), (moved, 2 * moved)]


@pytest.mark.parametrize("rows", [1, 64])
def test_weights_are_laid_out_before_arithmetic(rows):
    machine = HardwareSpec(10.0, memory_bandwidth=4.0, weight_bandwidth=8.0)
    work = (NodeWork(100.0, 1.0, 80.0), NodeWork(1.0, 40.0, 80.0))
    assert roofline_seconds(work, rows, machine) == [(10 + 10 * rows, 20 + 20 * rows)] * 2


@pytest.mark.parametrize(
    ("usual", "special"), [("convolution", "pointwise"), ("depthwise", "large_depthwise")]
)
def test_special_convolutions_are_as_usual_ones_where_they_were_not_measured(usual, special):
    slow, fast = (LayerSpeed(PassSpeed(speed), PassSpeed(speed)) for speed in (10.0, 20.0))
    work = (NodeWork(100.0, 1.0, 0.0, usual), NodeWork(100.0, 1.0, 0.0, special))
    assert roofline_seconds(work, 2, HardwareSpec(**{usual: slow})) == [(20.0, 20.0)] * 2
    machine = HardwareSpec(**{usual: slow, special: fast})
    assert roofline_seconds(work, 2, machine) == [(20.0, 20.0), (10.0, 10.0)]


def test_losses_take_steps_of_functions():
    """Of each entry of outputs that have gradients, whatever makes them."""
    x = keras.Input((6,))
    y = layers.Dense(4)(x)
    outputs = [
        layers.Reshape((2, 2))(y),
        layers.Dense(3, activation="relu")(y),
        keras.ops.argmax(y),
    ]
    graph = extract(keras.Model(x, outputs)).graph
    work = {node.kind: one for node, one in zip(graph.nodes, node_work(graph), strict=True)}
    loss = [NodeWork(15.0 * n, 0.0, 0.0, "function", 15.0 * n) for n in (4, 3)]
    assert work["Reshape"].parts == (loss[0],)
    assert work["Reshape"].flops == 60
    assert work["Dense"].parts == (loss[1],)  # the last one
    assert (work["Dense"].flops, work["Dense"].function_flops) == (2 * 4 * 3 + 3 + 3 + 45, 3 + 45)
    assert not work["Argmax"].parts
    machine = HardwareSpec(
        1e3,
        product=LayerSpeed(PassSpeed(10.0), PassSpeed(5.0)),
        function=LayerSpeed(PassSpeed(2.0, 1.0), PassSpeed(1.0, 3.0)),
    )
    both = [work["Reshape"], work["Dense"]]
    assert roofline_seconds(both, 1, machine) == [
        (1 + 60 / 2, 3 + 60 / 1),
        (pytest.approx(27 / 10 + 3 / 2 + 1 + 45 / 2), pytest.approx(27 / 5 + 3 / 1 + 3 + 45 / 1)),
    ]


def test_separable_convolutions_have_two_kinds():
    """By hand: 16 pixels of 4 channels, to 2, with a function of 4 steps."""
    kind = layers.SeparableConv2D(2, 5, padding="same", use_bias=False, activation="sigmoid")
    (work,) = work_of(kind, shape=(4, 4, 4))
    depthwise, pointwise, functions = 2 * 16 * 4 * 25, 2 * 16 * 4 * 2, 4 * 16 * 2
    assert work.flops == depthwise + pointwise + functions
    assert work.weight_bytes == 4 * (4 * 25 + 4 * 2)
    assert work.parts == (NodeWork(depthwise, 0, 4 * 4 * 25, "large_depthwise"),)
    machine = HardwareSpec(
        1e3,
        pointwise=LayerSpeed(PassSpeed(10.0, 1.0, 16.0), PassSpeed(5.0, 3.0, 8.0)),
        depthwise=LayerSpeed(PassSpeed(100.0, 4.0, 2.0), PassSpeed(50.0, 5.0)),
        function=LayerSpeed(PassSpeed(2.0), PassSpeed(1.0)),
    )
    forward = 1 + 4 * 4 * 2 / 16 + pointwise / 10 + functions / 2
    backward = 3 + 4 * 4 * 2 / 8 + pointwise / 5 + functions / 1
    assert roofline_seconds((work,), 1, machine) == [
        (
            pytest.approx(forward + 4 + 4 * 4 * 25 / 2 + depthwise / 100),
            pytest.approx(backward + 5 + depthwise / 50),
        )
    ]
    plain = HardwareSpec(1e3, memory_bandwidth=1e9)
    assert roofline_seconds((work,), 1, plain) == [(work.flops / 1e3, 2 * work.flops / 1e3)]


def test_layers_are_as_fast_as_their_kind():
    """Two samples, by hand."""
    machine = HardwareSpec(
        1e3, memory_bandwidth=4.0, weight_bandwidth=8.0,
        convolution=LayerSpeed(PassSpeed(10.0, 1.0, 16.0), PassSpeed(5.0, 3.0, 8.0)),
        normalization=LayerSpeed(PassSpeed(5.0), PassSpeed(4.0)),
        function=LayerSpeed(PassSpeed(2.0, 0.5), PassSpeed(1.0, 2.0)),
    )  # fmt: skip
    convolution = NodeWork(104.0, 1.0, 80.0, "convolution", 4.0)
    norm, relu = NodeWork(10.0, 1.0, 8.0, "normalization"), NodeWork(1.0, 8.0, 0.0, "function", 1.0)
    dense, view = NodeWork(100.0, 8.0, 80.0, "product"), NodeWork(0.0, 0.0, 0.0, "function")
    old = NodeWork(100.0, 8.0, 80.0)
    assert roofline_seconds((convolution, norm, relu, dense, view, old), 2, machine) == [
        (1 + 80 / 16 + 2 * 100 / 10 + 2 * 4 / 2, 3 + 80 / 8 + 2 * 100 / 5 + 2 * 4 / 1),
        (4.0, 5.0),
        (0.5 + 4.0, 2 + 2 * 4.0),  # traffic takes longer than the function
        (10 + 4.0, 2 * (10 + 4.0)),  # its kind was not measured
        (0.0, 0.0),
        (10 + 4.0, 2 * (10 + 4.0)),
    ]


def test_stages_are_balanced_by_what_their_layers_take():
    """Convolutions that are slower than products, and go backward more slowly."""
    x = inputs = keras.Input((8, 8, 8))
    for _ in range(4):
        x = layers.Conv2D(8, 3, padding="same")(x)
    for _ in range(16):  # as many FLOPs
        x = layers.Dense(18)(layers.Dense(8)(x))
    model = keras.Model(inputs, x)
    machine = HardwareSpec(
        1e9, memory_bandwidth=1e12, convolution=LayerSpeed(PassSpeed(5e8), PassSpeed(6e7))
    )
    plan = tnt.make_plan(
        model, 2, machine=machine, balance="flops", num_micro_batches=2, schedule="gpipe"
    )
    assert plan.certificate.optimal
    found = [sum(both) for both in stage_seconds(plan, machine, plan.micro_batch_size)]
    assert plan.certificate.value == pytest.approx(
        max(found) / 3 * machine.flops_per_second / plan.micro_batch_size
    )
    costs = PlanSimulation(plan, machine, "gpipe", 2).costs().stages
    forward, backward = stage_seconds(plan, machine, plan.micro_batch_size)[0]
    assert (costs[0].forward, costs[0].full_backward) == pytest.approx(
        (forward, backward), rel=1e-3
    )
    blind = tnt.make_plan(
        model, 2, machine=msgspec.structs.replace(machine, convolution=None), balance="flops",
        num_micro_batches=2, schedule="gpipe",
    )  # fmt: skip
    assert plan.stages[0].nodes < blind.stages[0].nodes


def test_a_plan_is_played_on_any_machine():
    plan = tnt.make_plan(models.batch_norm_cnn(), 2, machine="v100")
    assert plan.machine == tnt.machines["v100"]
    again = tnt.Plan.from_json(plan.to_json())
    assert again == plan
    rows, core = plan.micro_batch_size, tnt.machines["core"]
    whole = np.sum(roofline_seconds(plan.work, rows, core), axis=0)
    assert np.sum(stage_seconds(again, core, rows), axis=0) == pytest.approx(whole)
    step = PlanSimulation(again, tnt.machines["core"], plan.schedule, plan.num_micro_batches)
    assert step.step().step_seconds > plan.step_seconds
    with pytest.raises(PlanError, match="work must name all"):
        msgspec.structs.replace(plan, work=plan.work[1:])
    part = msgspec.structs.replace(plan.work[0], parts=(NodeWork(1.0, 0.0, 0.0, "depthwise"),))
    other = msgspec.structs.replace(plan, work=(part, *plan.work[1:]))
    assert tnt.Plan.from_json(other.to_json()) == other


def test_an_old_plan_has_stages_of_one_operation():
    plan = msgspec.structs.replace(tnt.make_plan(models.batch_norm_cnn(), 2), work=())
    machine = HardwareSpec(1e6, memory_bandwidth=1e6)
    assert [forward for forward, _ in stage_seconds(plan, machine, 2)] == [
        max(2 * stage.flops, stage.parameter_bytes) / 1e6 for stage in plan.stages
    ]


def test_machines_by_name_and_file(tmp_path, capsys):
    command = Command(capsys)
    assert machine_of("V100") is tnt.machines["v100"]
    path = tmp_path / "machine.json"
    speed = LayerSpeed(PassSpeed(5e10, 1e-5, 1e9), PassSpeed(2e10, 2e-5))
    mine = HardwareSpec(1e11, bandwidth=None, memory_bandwidth=2e10, convolution=speed)
    mine.save(path)
    assert machine_of(path) == machine_of(str(path)) == mine
    old = '{"flops_per_second": 8e10, "memory_bandwidth": 1e10, "weight_bandwidth": null}'
    (tmp_path / "old.json").write_text(old, encoding="utf-8")
    before = machine_of(tmp_path / "old.json")
    assert (before, before.layers) == (HardwareSpec(8e10, memory_bandwidth=1e10), {})
    code = command(
        "plan", "make", "tests.zoo.models:batch_norm_cnn", "--stages", "2",
        "--machine", path, "-o", tmp_path / "plan.json",
    )  # fmt: skip
    assert code == 0
    plan = tnt.Plan.load(tmp_path / "plan.json")
    assert plan.machine == mine
    seconds = []
    for machine in ("p40", "h200"):
        found = command.json("simulate", tmp_path / "plan.json", "--machine", machine)
        seconds.append(found["step_seconds"])
    assert seconds[0] > seconds[1] > 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "machine.json: This is no valid machine"),
        ('{"speed": 1}', "speed"),
        ('{"flops_per_second": 0}', "flops_per_second"),
        ('{"latency": -1}', "latency"),
        ('{"memory_bandwidth": 0}', "memory_bandwidth"),
        (f'{{"depthwise": {{"forward": {ZERO}, "backward": {ONE}}}}}', "depthwise.forward.flops"),
        (f'{{"function": {{"forward": {ONE}, "backward": {ZERO}}}}}', "function.backward.flops"),
        (f'{{"product": {{"forward": {ONE}}}}}', "product"),
    ],
)
def test_files_without_a_machine_are_refused(tmp_path, text, complaint):
    (tmp_path / "machine.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=complaint):
        machine_of(tmp_path / "machine.json")


@pytest.mark.parametrize("name", ["gpu", "missing.json", 3])
def test_unknown_machines_are_refused(name):
    with pytest.raises(ConfigurationError, match=r"one of core, p40.*Received: machine="):
        tnt.make_plan(models.batch_norm_cnn(), 2, machine=name)


def test_a_resnet_is_balanced_better_than_by_hand():
    """torchgpipe's balance, on a P40 that reaches what was published on one of them."""
    machine = HardwareSpec(7.2e12, 12e9, 1e-5, memory_bandwidth=2.77e11)
    given = {
        "batch_size": 4096, "num_micro_batches": 256, "schedule": "gpipe", "machine": machine,
    }  # fmt: skip
    with only_shapes():
        model = extract(resnet101())
    plans = (
        tnt.make_plan(model, balance=(44, 92, 124, 110), **given),
        tnt.make_plan(model, 4, balance="flops", **given),
    )
    theirs, ours = (max(stage_seconds(plan, machine, 16))[0] for plan in plans)
    assert theirs > 1.1 * ours
    assert plans[1].certificate.optimal


@pytest.mark.parametrize(
    ("build", "size", "places", "millions"),
    [
        (unet, (6, 72), 285, 362.2),
        (amoebanet, (18, 208), 24, 81.5),
    ],
)
def test_published_models_have_the_published_parameters(build, size, places, millions):
    with only_shapes():
        graph = extract(build(*size)).graph
    assert 1 + max(int(node.name[1:].partition("_")[0]) for node in graph.nodes) == places
    trained = sum(weight.bytes for weight in graph.weights if weight.trainable) / 4e6
    assert trained == pytest.approx(millions, rel=1e-3)
