"""The private parts of Keras and TensorFlow that training relies on, one by one.

When one of these fails after an upgrade, the file that it names is the place to mend.
"""

import gc
import inspect
import weakref
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.losses.losses import LossFunctionWrapper

from tarantella_pp.internals import training
from tests.helpers.own_steps import Bounded
from tests.zoo.models import chain

pytestmark = pytest.mark.keras


@pytest.fixture
def model():
    first = layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")
    model = chain((3,), first, layers.Dense(2))
    model.compile("sgd", "mse", metrics=["mae"], loss_weights=2.0)
    return model


def test_layers_know_what_they_added(model):
    model(np.ones((2, 3)))
    dense = model.layers[1]
    assert len(dense.losses) == 2
    assert [name for name, _ in training.added_losses(model)] == [dense.name]


class Squared:
    def loss(self, y, p):
        return (y - p) ** 2


def test_metrics_and_losses_know_the_function_that_they_are_made_of(model):
    metrics = keras.metrics
    own = metrics.MeanMetricWrapper(lambda y, p: y - p)
    found = map(training.made_by_keras, (metrics.Hinge(), metrics.AUC(), own))
    assert list(found) == [True, True, False]
    method = Squared().loss
    for loss in ("mse", keras.losses.Huber(), method):
        compiled = training.compile_loss(model, loss, None)
        compiled.build(np.zeros((2, 2)), np.zeros((2, 2)))
        (found,) = training.losses_of_outputs(compiled)
        assert training.made_by_keras(found) == (loss is not method)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_softmax_and_sigmoid_know_what_they_were_applied_to(name):
    kept = []

    @tf.function
    def apply(x):
        made = getattr(keras.activations, name)(x)
        kept.append(training.logits_of(made) is x)
        kept.append(made.op.type.lower() == name)
        return made

    apply(tf.zeros((2, 3)))
    assert all(kept), "_keras_logits"
    assert training.logits_of(tf.zeros(3)) is None


def test_what_forward_passes_may_write_is_known():
    parts = layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(2)
    model = keras.Sequential([keras.Input((3,)), *parts])
    seed = parts[0].seed_generator.state
    keras.random.normal((1,))
    assert tuple(training.global_seed().shape) == (2,), "global_seed_generator"
    states = training.running_states(model)
    assert {id(s) for s in states} == {
        id(s) for s in (seed, parts[1].moving_mean, parts[1].moving_variance)
    }


def test_batch_statistics_can_be_left_out_of_training():
    norm = layers.BatchNormalization()
    norm.build((None, 3))
    x = np.arange(6, dtype="float32").reshape(2, 3)
    with training.moments_known(norm) as taken:
        frozen = norm(x, training=True)
    np.testing.assert_allclose(frozen, norm(x, training=False), err_msg="_moments")
    assert [average for average, _ in taken] == [norm.moving_mean, norm.moving_variance]
    assert all((np.asarray(average) == np.asarray(moment)).all() for average, moment in taken)
    assert "_moments" not in vars(norm)
    assert len(norm.trainable_variables) == 2
    assert np.abs(norm(x, training=True) - frozen).max() > 0.1


@pytest.mark.parametrize("done", [True, False])
def test_batch_norms_tell_what_they_find(done):
    norm = layers.BatchNormalization(momentum=0.5)
    norm.build((None, 3))
    x = np.arange(6, dtype="float32").reshape(2, 3)
    told = []

    def note(part, *found):
        told.append((part, *map(np.asarray, found)))
        return done

    with training.reported_moments(norm, note):
        norm(x, training=True)
    assert told, "BatchNormalization._moments, _reduction_axes"
    part, count, mean, variance = told.pop()
    assert (part, count) == (norm, 2)
    np.testing.assert_allclose([mean, variance], [x.mean(0), x.var(0)], rtol=1e-6)
    left = (np.asarray(norm.moving_mean) == 0).all()
    assert left == done, "BatchNormalization takes in momentum after _moments"
    assert norm.momentum == 0.5
    assert "_moments" not in vars(norm)


def test_losses_and_metrics_are_built_without_data(model):
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.F1Score()])
    symbols = [keras.KerasTensor((None, 2)) for _ in range(2)]
    training.build_metrics(model, *symbols, None)
    assert training.compiled_loss(model).built, "compute_output_spec builds CompileLoss"
    metrics = training.compiled_metrics(model)
    assert metrics.built, "CompileMetrics.build"
    owned = [variable for metric in metrics.metrics for variable in metric.variables]
    assert owned == metrics.variables, "CompileMetrics.variables are those of its metrics"
    before = [np.array(v).tolist() for v in owned]
    after = metrics.stateless_update_state(owned, np.ones((4, 2)), np.zeros((4, 2)))
    assert [float(v) for v in after[:2]] == [4.0, 4.0], "stateless_update_state"
    assert [np.array(v).tolist() for v in owned] == before
    training.track_loss(model, 2.0, 4)
    assert float(model.metrics[0].result()) == 2.0, "Model._loss_tracker"


def test_a_second_loss_gives_the_values_of_the_first_or_others(model):
    seen = []

    def instead(loss, y_true, y_pred, sample_weight):
        seen.append((loss.name, y_pred.shape, sample_weight))
        return keras.ops.ones(())

    y, p = np.ones((4, 2), "float32"), np.arange(8, dtype="float32").reshape(4, 2)
    first = training.compiled_loss(model)
    second = training.SecondLoss(first)
    assert float(second(y, p)) == float(first(y, p)), "attributes of CompileLoss"
    assert second.metrics == [None]
    assert float(training.SecondLoss(first, instead)(y, p)) == 2.0, "_flat_losses"
    assert seen == [("mse", (4, 2), None)]


@pytest.mark.parametrize("reduction", ["sum", "mean", "mean_with_sample_weight", None])
def test_a_loss_is_made_of_values_and_a_reduction(reduction):
    kind = keras.losses.SparseCategoricalCrossentropy
    loss = kind(ignore_class=0, reduction=reduction)
    y, p = np.array([0, 1, 2, 1]), np.full((4, 3), 1 / 3, "float32")
    weight = np.array([1.0, 2.0, 3.0, 4.0], "float32")
    values, mask = training.sample_values(loss, y, p)
    assert values.shape == (4,), "Loss.call"
    assert np.asarray(mask).tolist() == [False, True, True, True], "masks of losses"
    reduced = training.reduction_of(loss, values, weight, mask)
    np.testing.assert_array_equal(reduced, loss(y, p, weight), "reduce_weighted_values")


def test_losses_that_are_called_in_a_way_of_their_own_have_no_values():
    class Own(keras.losses.MeanSquaredError):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return keras.ops.max(y_true - y_pred)

    assert not training.reduces_values(Own())
    assert training.reduces_values(LossFunctionWrapper(lambda a, b: a - b))
    assert training.reduces_values(keras.losses.CategoricalHinge())


def test_inputs_are_standardized(model):
    (flat,) = training.standardize_inputs(model, np.ones((2, 3), "float64"))
    assert flat.dtype == "float32"


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_loops_are_those_that_are_overridden(name):
    from tarantella_pp.models.pipeline_model import PipelineModel

    theirs = inspect.signature(getattr(keras.Model, name)).parameters
    ours = inspect.signature(getattr(PipelineModel, name)).parameters
    assert list(ours) == list(theirs), f"arguments of Model.{name}"
    defaults = [p.default for p in ours.values() if p.name not in ("self", "kwargs")]
    assert defaults == [p.default for p in theirs.values() if p.name not in ("self", "kwargs")]


def test_models_remember_the_strategy_they_were_made_in(model):
    assert training.strategy_of(model) is None, "Model._distribute_strategy"
    with (strategy := tf.distribute.OneDeviceStrategy("CPU:0")).scope():
        made = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    assert training.strategy_of(made) is strategy


class Halved(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([gradient / 2 for gradient in grads], trainable_variables)


def optimizers():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    return [keras.optimizers.Adam(), scaled, Halved(), Bounded()]


@pytest.mark.parametrize("optimizer", optimizers(), ids=lambda o: type(o).__name__)
def test_updates_are_taken_once_and_only_for_a_while(optimizer):
    weight, taken = keras.Variable(np.ones(3)), []
    with training.updates_taken(lambda *given: taken.append(given)):
        optimizer.apply_gradients([(keras.ops.ones(3), weight)])
    assert [given[0] for given in taken] == [optimizer], "BaseOptimizer.apply"
    assert np.array_equal(weight, np.ones(3))
    assert np.array_equal(taken[0][1], [np.ones(3)])
    variables = training.variables_for(optimizer, taken[0][2])
    assert variables == [weight] == training.variables_for(optimizer, None), (
        "Optimizer._trainable_variables"
    )
    optimizer.apply_gradients([(keras.ops.ones(3), weight)])
    assert len(taken) == 1
    assert int(optimizer.iterations) == 1


def test_functions_of_graphs_can_be_registered():
    add = tf.function(lambda x: x + 1.0).get_concrete_function(tf.TensorSpec([])).function_def
    add.signature.name = "added_by_a_test"
    training.register_function(add)
    training.register_function(add)
    assert training.context.context().has_function("added_by_a_test"), "add_function_def"


def test_the_body_of_a_function_is_found():
    inner = tf.function(lambda x: tf.maximum(x, 1.0), autograph=False)
    outer = tf.function(lambda x: inner(x), autograph=False)
    graph = outer.get_concrete_function(tf.TensorSpec([None])).graph
    (call,) = (op for op in graph.get_operations() if "Call" in op.type)
    body = training.body_of(call)
    assert "Maximum" in {op.type for op in body.get_operations()}
    assert len(body.inputs) == len(call.inputs)
    assert training.body_of(body.get_operations()[0]) is None
    loop = tf.function(lambda x: tf.while_loop(lambda y: y < 9.0, lambda y: (y + 1.0,), (x,)))
    operations = loop.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
    (step,) = filter(None, map(training.step_of, operations))
    assert "AddV2" in {op.type for op in step.get_operations()}


def test_compiled_functions_run_without_pythons_graphs():
    branches = tf.function(lambda x: tf.cond(x > 1.0, lambda: x + 1.0, lambda: x - 1.0))
    of_its_own = tf.custom_gradient(lambda x: (x, lambda upstream: upstream + 0.0 * x))
    outer = tf.function(
        lambda x: tf.debugging.check_numerics(branches(of_its_own(x)), "not finite")
    )
    function = outer.get_concrete_function(tf.TensorSpec([]))
    graph = weakref.ref(function.graph)
    run = training.without_graph(function)
    del outer, function
    gc.collect()
    assert graph() is None, "_cached_graph or gradient_registry"
    assert [float(*run.call_flat(tf.constant(x))) for x in (0.5, 2.0)] == [-0.5, 3.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        run.call_flat(tf.constant(float("nan")))


def test_a_gpu_is_found_where_there_is_one(monkeypatch):
    assert training.gpu_in_use() is None
    (real,) = (d for d in training.device_lib.list_local_devices() if d.device_type == "CPU")
    assert real.memory_limit > 0
    assert isinstance(real.physical_device_desc, str)
    cpu, gpu = (
        SimpleNamespace(device_type=kind, memory_limit=size, physical_device_desc=name)
        for kind, size, name in (("CPU", 7, ""), ("GPU", 9, "pci bus id: 01"))
    )
    for name in ("get_visible_devices", "list_logical_devices"):
        monkeypatch.setattr(tf.config, name, lambda kind: [kind])
    monkeypatch.setattr(training.device_lib, "list_local_devices", lambda: [cpu, gpu])
    assert training.gpu_in_use() == ("pci bus id: 01", 9)


def test_tf_gradients_is_noted_with_its_scope():
    @tf.function
    def slope(x):
        with tf.name_scope("inside"):
            return tf.gradients(x * x, [x])

    with training.gradients_asked() as asked:
        slope(tf.ones(3))
    ((scope, (y,), (x,)),) = asked
    assert (scope, y.op.type, x.op.type) == ("inside", "Mul", "Placeholder")
