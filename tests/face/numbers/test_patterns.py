"""Patterns of Keras' examples, on two stages or replicas: the numbers of one process.

Losses inside of layers without targets, frozen parts, states that cross stages, and a step of
one's own that takes no targets.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tarantella_pp as tnt
from tests.helpers.mpi import mpi_run
from tests.helpers.own_steps import net
from tests.helpers.training import ROUNDING, distance, floats, integers, use_float64

pytestmark = [pytest.mark.keras, pytest.mark.mpi]

ROWS, BATCH = 16, 4


class Endpoint(layers.Layer):
    """Takes the targets as an input and adds the loss itself, as endpoints of CTC do."""

    def call(self, y, y_pred):
        lengths = ops.ones((ops.shape(y)[0],), dtype="int32")
        value = ops.ctc_loss(y, y_pred, lengths * 2, lengths * 5, mask_index=0)
        self.add_loss(ops.mean(value))
        return y_pred


def ctc():
    sound = keras.Input((5, 6), name="sound")
    labels = keras.Input((2,), dtype="int32", name="labels")
    x = layers.Conv1D(4, 3, padding="same", activation="relu")(sound)
    x = layers.Dense(5)(layers.Dense(6, "relu")(x))
    return keras.Model([sound, labels], Endpoint()(labels, x))


def transfer():
    base = keras.Sequential(
        [keras.Input((6, 6, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()],
        name="base",
    )
    base.trainable = False
    inputs = keras.Input((6, 6, 3))
    x = layers.RandomTranslation(0.0, 0.0, seed=3)(layers.Rescaling(0.5, offset=-0.1)(inputs))
    x = layers.GlobalAveragePooling2D()(base(x, training=False))
    x = layers.Dense(5, "tanh")(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))


def sequence_to_sequence():
    source, target = keras.Input((None, 5), name="source"), keras.Input((None, 4), name="target")
    _, *states = layers.LSTM(6, return_state=True)(source)
    decoded, _, _ = layers.LSTM(6, return_sequences=True, return_state=True)(
        target, initial_state=states
    )
    return keras.Model([source, target], layers.Dense(4, activation="softmax")(decoded))


class Sampling(layers.Layer):
    """Mean and a little of the deviation: what it draws is zero, so that any cut draws the same."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        mean, log_variance = inputs
        drawn = keras.random.normal(ops.shape(mean), stddev=0.0, seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * drawn


class VAE(keras.Model):
    """An autoencoder with trackers of its own and a step of its own."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((6,))
        x = layers.Dense(5, "relu")(inputs)
        mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
        self.encoder = keras.Model(
            inputs, [mean, log_variance, Sampling()([mean, log_variance])], name="encoder"
        )
        self.decoder = net(2, 5, 6)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "kl_loss")]

    @property
    def metrics(self):
        return self.trackers

    def call(self, x):
        return self.decoder(self.encoder(x)[2])

    def _parts(self, data):
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        mean, log_variance, z = self.encoder(x)
        far = ops.mean(ops.sum(ops.square(x - self.decoder(z)), axis=1))
        kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        kl = ops.mean(ops.sum(kl, axis=1))
        return far + kl, kl

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self._parts(data)
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self._told(losses)

    def test_step(self, data):
        return self._told(self._parts(data))

    def _told(self, losses):
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


CLASSES, STEPS = integers(3)[:ROWS], np.eye(4)[integers(4, 6)[:ROWS]]
# Each with its data, its loss, and whether it is evaluated: in another computation than training.
PATTERNS = {
    ctc: ([floats(5, 6)[:ROWS], 1 + integers(4, 2)[:ROWS]], None, None, False),
    transfer: (floats(6, 6, 3)[:ROWS], CLASSES, "sparse_categorical_crossentropy", True),
    sequence_to_sequence: (
        [floats(5, 5)[:ROWS], STEPS], STEPS, "categorical_crossentropy", False,
    ),
    VAE: (floats(6)[:ROWS], None, None, True),
}  # fmt: skip


def trained(build, wrap=None):
    """What comes of a pattern: logs, weights and perhaps predictions."""
    use_float64()
    keras.utils.set_random_seed(4)
    model = wrap(build()) if wrap else build()
    x, y, loss, evaluated = PATTERNS[build]
    metrics = None if y is None else ["accuracy"]
    # Eager steps give the same numbers, and these models would be traced longer than run.
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=metrics, run_eagerly=not wrap)
    options = {"batch_size": BATCH, "verbose": 0}
    held_out = {"validation_split": 0.5} if evaluated else {}
    found = {"history": model.fit(x, y, shuffle=False, **options, **held_out).history}
    if evaluated:
        found["predictions"] = model.predict(x, **options).tolist()
    return {**found, "weights": [weight.tolist() for weight in model.get_weights()]}


def on_ranks():
    """Each pattern that can be cut as a pipeline, the one with its own step as replicas."""
    two_stages = functools.partial(tnt.PipelineModel, num_stages=2, num_micro_batches=2)
    return [trained(build, tnt.Model if build is VAE else two_stages) for build in PATTERNS]


@pytest.mark.slow
def test_patterns_of_keras_examples_train_as_in_one_process():
    first, second = mpi_run(2, on_ranks, timeout=240).check().results
    assert first == second
    for build, found in zip(PATTERNS, first, strict=True):
        plain = trained(build)
        if build is ctc:  # which TensorFlow computes in float32, and other sums round otherwise
            assert distance(found["history"], plain["history"]) < 1e-6
        else:
            assert distance(found, plain) < ROUNDING, build
