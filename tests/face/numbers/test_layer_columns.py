"""Layers larger than a stage's share: cut by columns, exact, and one layer to files and users."""

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers import training
from tests.helpers.mpi import mpi_run

pytestmark = pytest.mark.keras

WORDS, WIDTH, TOKENS = 2100, 64, 4
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, WORDS, (2, 12, TOKENS))
X[:, 1] = X[:, 0]  # repeated rows, which Keras clips one by one
X[::2, 3] = 0


def tied_model():
    """Words come from the table and go back to it; some are masked, and padding is attended to."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((TOKENS,), dtype="int32")
    table = layers.ReversibleEmbedding(WORDS, 3 * WIDTH, mask_zero=True, name="words")
    x = table(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(1, 8)(x, x))
    return keras.Model(inputs, table(x, reverse=True))


def language_model(**head):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(x)
    x = layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x))
    x = keras.Model(y := keras.Input((TOKENS, 2 * WIDTH)), layers.Dense(WIDTH)(y))(x)
    return keras.Model(inputs, layers.Dense(WORDS, name="head", **head)(x))


def adam(undecayed=(), **options):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, **options)
    optimizer.exclude_from_weight_decay(var_names=undecayed)
    return optimizer


class OfEachColumn(keras.optimizers.SGD):
    """Divides gradients by the sum of each column, so that of a bias by that of all."""

    def update_step(self, gradient, variable, learning_rate):
        total = keras.ops.sum(keras.ops.abs(gradient), axis=0, keepdims=True)
        super().update_step(gradient / total, variable, learning_rate)


def wrapped(model, stages=2, **options):
    return tnt.PipelineModel(model, stages, 2, batch_size=4, **options)


def compiled(model, optimizer, **options):
    loss = training.from_logits()
    return training.compiled(model, optimizer, loss, metrics=["accuracy"], **options)


def fitted(model, optimizer, epochs=2, **options):
    compiled(model, optimizer, run_eagerly=not isinstance(model, tnt.PipelineModel))
    return model.fit(X, Y, 4, epochs, verbose=0, shuffle=False, **options).history


def parts(model):
    return [name for name in model.plan.node_names if "of" in name]


def largest_difference(ours, theirs):
    return max(float(np.max(np.abs(np.subtract(*p)))) for p in zip(ours, theirs, strict=True))


def stage_of_each(plan, name):
    pairs = zip(plan.node_names, plan.assignment, strict=True)
    return [stage for node, stage in pairs if node.startswith(f"{name}/") and "of" in node]


def train_on_ranks(folder):
    """Differences from plain Keras, and of each pipeline its parts and this rank's slots."""
    training.use_float64()
    found, sizes = [], []

    def compare(model, plain):
        found.append(largest_difference(model.get_weights(), plain.get_weights()))
        held = sum(int(np.prod(v.shape)) for v in model.optimizer.variables if len(v.shape) > 1)
        sizes.append([len(parts(model)), held])

    # Clipped by the norm of a whole weight; on four ranks by that of all, with two replicas
    replicas, file = world().size // 2, Path(folder) / "model.keras"
    clipped = {"clipnorm": 0.01} if replicas == 1 else {"global_clipnorm": 0.1}
    clipped |= {"undecayed": ["head"]} if replicas > 1 else {}  # 'head/kernel:0', deferred too
    plain = language_model()
    expected = fitted(plain, adam(use_ema=True, **clipped), validation_data=(X[:3], Y[:3]))
    model = wrapped(language_model() if replicas == 1 else language_model, num_replicas=replicas)
    history = fitted(model, adam(use_ema=True, **clipped), validation_data=(X[:3], Y[:3]))
    compare(model, plain)
    found.append(largest_difference(history.values(), expected.values()))
    model.save(file)
    again = keras.saving.load_model(file)
    found.append(largest_difference(again.get_weights(), plain.get_weights()))
    found.append(largest_difference(again.optimizer.variables, plain.optimizer.variables))
    if replicas > 1:
        return found, sizes
    model = tnt.models.load_model(file, num_stages=2, num_micro_batches=2, batch_size=4)
    for one in (model, plain):  # both train on
        one.fit(X, Y, 4, verbose=0, shuffle=False)
    compare(model, plain)
    # A checkpoint of parts, gone on from in whole layers, and in parts again; of a tied table
    fitted(plain := tied_model(), adam(global_clipnorm=0.1), epochs=3)
    for epochs, how in enumerate(({}, {"balance": [4, 1]}, {}), 1):
        model = wrapped(tied_model(), **how)
        run = tnt.callbacks.Checkpoint(Path(folder) / "run", every=2)
        fitted(model, adam(global_clipnorm=0.1), epochs, callbacks=[run])
        compare(model, plain)
    return found[:-3] + found[-1:], sizes


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_on_ranks_train_as_one_process_does(ranks, tmp_path):
    """Weights, logs, files, slots and checkpoints; no rank has all slots of the head."""
    results = mpi_run(ranks, train_on_ranks, str(tmp_path), timeout=400).check().results
    for found, sizes in results:
        assert max(found) < 1e-10, found
        assert [bool(count) for count, _ in sizes] == [True, True, True, False, True][: len(sizes)]
    head = 3 * WORDS * WIDTH  # two moments and an average
    (_, of_first), (_, of_last) = results[0][1][0], results[1][1][0]
    assert of_last < head < of_first < 2 * head < of_first + of_last


def test_only_what_is_larger_than_a_stages_share_is_cut():
    """The stages become even; the embedding, which takes no time, is cut for memory only."""
    model = language_model()
    lamb = keras.optimizers.Lamb()
    whole = tnt.make_plan(model, 2, num_micro_batches=2, batch_size=8, optimizer=lamb)
    plan = tnt.make_plan(model, 2, num_micro_batches=2, batch_size=8)
    assert not any("of" in name for name in whole.node_names)
    assert set(stage_of_each(plan, "head")) == {0, 1}
    assert not stage_of_each(plan, "words")
    assert max(s.flops for s in plan.stages) < 0.8 * max(s.flops for s in whole.stages)
    assert plan.step_seconds < whole.step_seconds
    smallest = tnt.make_plan(model, 4, batch_size=8, balance="memory")
    assert len(set(stage_of_each(smallest, "words"))) > 1
    # Other ranks make the same graph of the plan alone
    read = extract(model).planned_by(plan.fingerprint, plan.node_names)
    assert read.graph.fingerprint() == plan.fingerprint


@pytest.mark.parametrize(
    "head",
    [
        {"kernel_regularizer": "l2"}, {"bias_constraint": "non_neg"},
        {"activity_regularizer": "l2"}, {"lora_rank": 2}, {"activation": layers.PReLU},
    ],
    ids=lambda head: next(iter(head)),
)  # fmt: skip
def test_what_needs_a_whole_layer_stays_whole(head):
    """Regularizers, constraints, and weights of another kind."""
    made = {name: value() if isinstance(value, type) else value for name, value in head.items()}
    plan = tnt.make_plan(language_model(**made), 2, num_micro_batches=2, batch_size=8)
    assert not any("of" in name for name in plan.node_names)


@pytest.mark.usefixtures("untried")
def test_a_layer_in_parts_is_one_layer_to_its_user():
    """It is frozen, set, read and called as ever; in one process, with more stages than ranks."""
    plain, own = language_model(activation="softplus"), language_model(activation="softplus")
    plan = tnt.make_plan(own, 2, num_micro_batches=2, batch_size=4)
    own.get_layer("head").trainable = False  # until it is wrapped
    model = tnt.PipelineModel(own, plan=plan)
    assert parts(model)
    for one, user in ((plain, plain), (model, own)):
        user.get_layer("head").trainable = True
        user.get_layer("head").kernel.assign(user.get_layer("head").kernel * 0.5)
        user.get_layer("head").bias.trainable = False
        fitted(one, adam())
        user.get_layer("head").trainable = True
        fitted(one, adam(), callbacks=[keras.callbacks.EarlyStopping("loss", 1, 0, 0, "max")])
    assert largest_difference(model.get_weights(), plain.get_weights()) < 1e-10
    assert largest_difference([own.predict(X, verbose=0)], [model.predict(X, verbose=0)]) < 1e-10
    again = tnt.PipelineModel(own, plan=model.plan)
    for one in (plain, again):
        fitted(one, adam())
    assert largest_difference(model.get_weights(), plain.get_weights()) < 1e-10


def test_what_would_train_parts_otherwise_is_refused():
    """Optimizers that look at whole weights, and whoever else would train the whole ones."""
    own = language_model()
    optimizers, kernel = keras.optimizers, own.get_layer("head").kernel
    several, clipping = (optimizers.OptimizerMap(adam(clipnorm=c), {}) for c in (None, 1.0))
    excluding, later = adam(), adam()
    excluding.exclude_from_weight_decay([kernel])
    model = wrapped(own)
    later.exclude_from_weight_decay([kernel])
    looking = [
        later, optimizers.Lamb(), optimizers.Adafactor(), OfEachColumn(), excluding,
        optimizers.MultiOptimizer(clipping),
    ]  # fmt: skip
    for optimizer in looking:
        with pytest.raises(ConfigurationError, match="stages have weight 'head/kernel' in parts"):
            compiled(model, optimizer)
    compiled(model, optimizers.MultiOptimizer(several))
    with pytest.raises(ConfigurationError, match="train 'head/kernel', in parts of their own"):
        wrapped(own, balance=[3, 2])
    with pytest.raises(ConfigurationError, match="in parts, which the model by itself cannot"):
        fitted(own, adam())
    # Known beforehand, such an optimizer leaves layers whole
    plain, own = language_model(), language_model()
    model = wrapped(compiled(own, optimizers.Lamb()))
    plans = [tnt.make_plan(plain, 2, batch_size=4, optimizer=each) for each in looking[3:]]
    assert not parts(model)
    assert not any("of" in name for plan in plans for name in plan.node_names)
