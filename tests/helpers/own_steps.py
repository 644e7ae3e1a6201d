"""Models with steps of their own, as users write them, and what training them gives."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.helpers.training import begun

RNG = np.random.default_rng(7)
X, Y = RNG.normal(size=(23, 6)), RNG.normal(size=(23, 3))
IDS = RNG.integers(0, 5, size=(23, 4)).astype("int32")


class Regression(keras.Model):
    """Losses and metrics that the user keeps, one a batch and one a sample."""

    reduce = staticmethod(tf.reduce_mean)

    def __init__(self, **options):
        super().__init__(**options)
        self.first = layers.Dense(8, "tanh", kernel_regularizer="l2")
        self.last = layers.Dense(3)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.tracker, self.error]

    def call(self, x):
        return self.last(self.first(x))

    def loss_of(self, x, y):
        predicted = self(x, training=True)
        return self.reduce(tf.square(predicted - y)) + sum(self.losses), predicted

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss, predicted = self.loss_of(x, y)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.logs(loss, y, predicted)

    def logs(self, loss, y, predicted):
        self.tracker.update_state(loss)
        self.error.update_state(y, predicted)
        steps = tf.cast(self.optimizer.iterations, "float64")
        return {"raw": loss, "steps": steps, **{m.name: m.result() for m in self.metrics}}

    def track(self, loss, rows):
        self.tracker.update_state(loss, sample_weight=rows)

    def test_step(self, data):
        x, y = data
        loss, predicted = self.loss_of(x, y)
        self.track(loss, tf.shape(x)[0])
        self.error.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


class SumOfLosses(Regression):
    """A loss that is a sum over the samples, of all but the regularizers."""

    reduce = staticmethod(tf.reduce_sum)

    def loss_of(self, x, y):
        predicted = self(x, training=True)
        return self.reduce(tf.square(predicted - y)), predicted

    def track(self, loss, rows):
        self.tracker.update_state(loss)


def net(given, hidden, made):
    inner = layers.Dense(hidden, activation="relu")
    return keras.Sequential([keras.Input((given,)), inner, layers.Dense(made)])


class GAN(keras.Model):
    """Two nets, an optimizer for each, and a step in which the second reads the first's update."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = net(6, 5, 3), net(3, 5, 1)

    def call(self, x):
        return self.critic(self.generator(x))

    def compile(self, optimizer, loss=None, **options):
        super().compile(optimizer, loss, **options)
        self.of_critic = keras.optimizers.Adam(2e-2)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "critic_loss")]

    @property
    def metrics(self):
        return self.trackers

    def _critics_loss(self, x, real):
        judged = ops.concatenate([self(x), self.critic(real)], axis=0)
        zeros = ops.zeros((ops.shape(x)[0], 1))
        return self.loss(ops.concatenate([zeros + 1, zeros], axis=0), judged)

    def _makers_loss(self, x):
        return self.loss(ops.zeros((ops.shape(x)[0], 1)), self(x))

    def train_step(self, data):
        x, real = data
        with tf.GradientTape() as tape:
            critics = self._critics_loss(x, real)
        weights = self.critic.trainable_weights
        self.of_critic.apply_gradients(zip(tape.gradient(critics, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            makers = self._makers_loss(x)
        weights = self.generator.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(makers, weights), weights, strict=True))
        return self._told(makers, critics)

    def test_step(self, data):
        x, real = data
        return self._told(self._makers_loss(x), self._critics_loss(x, real))

    def _told(self, *losses):
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Teacher(keras.Model):
    """Overrides the loss only; keeps averages of weights, and of samples, of its own."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(5, 4)
        self.places = layers.Embedding(4, 4)
        self.last = layers.Dense(3)
        self.follows = layers.Dense(3, trainable=False)
        self.seen = self.add_weight(shape=(), name="seen", trainable=False)

    def call(self, ids):
        found = self.table(ids) + self.places(ops.arange(ops.shape(ids)[1]))
        hidden = ops.mean(ops.tanh(found), axis=1)
        self.add_loss(0.1 * ops.mean(ops.square(hidden)))
        return self.last(hidden) + 0.1 * self.follows(hidden)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred)) + sum(self.losses)

    def train_step(self, data):
        logs = super().train_step(data)
        for weight, average in zip(self.last.weights, self.follows.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.seen.assign(0.5 * self.seen + 0.5 * tf.reduce_mean(data[1]))
        return logs


def scaling(optimizer):
    """Scales losses, twice as much every other step."""
    return keras.optimizers.LossScaleOptimizer(optimizer, 1024.0, dynamic_growth_steps=2)


class Bounded(keras.optimizers.SGD):
    """Changes gradients before it applies them."""

    def apply_gradients(self, grads_and_vars):
        grads_and_vars = ((g if g is None else ops.tanh(g), v) for g, v in grads_and_vars)
        return super().apply_gradients(grads_and_vars)


def judged():
    return keras.losses.BinaryCrossentropy(from_logits=True)


CASES = {
    "regression": (Regression, lambda: [scaling(keras.optimizers.Adam(0.01, clipnorm=0.1))], X),
    "sum": (SumOfLosses, lambda: [Bounded(0.01, global_clipnorm=0.5)], X),
    "adversaries": (GAN, lambda: [keras.optimizers.SGD(0.1, momentum=0.9), judged()], X),
    "teacher": (Teacher, lambda: [keras.optimizers.Adam(0.01)], IDS),
}


def numbers_of(case, wrap=None, seed=3):
    """What training a case gives: even batches, uneven ones, and some smaller than the ranks."""
    build, optimizers, x = CASES[case]
    model = begun(build, wrap, *optimizers(), seed=seed)
    quiet = {"shuffle": False, "verbose": 0}
    found = {"fit": model.fit(x, Y, batch_size=8, epochs=2, **quiet).history}
    batches = tf.data.Dataset.from_tensor_slices((x[:7], Y[:7])).batch(2)
    found["tiny"] = model.fit(batches, validation_data=(x[:5], Y[:5]), **quiet).history
    found["evaluated"] = model.evaluate(x, Y, batch_size=5, return_dict=True, verbose=0)
    if case == "teacher":
        found["predicted"] = model.predict(x, batch_size=4, verbose=0).tolist()
    found["weights"] = [weight.tolist() for weight in model.get_weights()]
    return found
