"""Models as people write them: on two stages and on two replicas the numbers of one process.

Each is a pattern of Keras' examples, small and in our own words: layers of one's own, states that
cross stages, towers that share weights, losses inside of layers, steps of one's own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tarantella_pp as tnt
from tests.helpers import training
from tests.helpers.mpi import mpi_run
from tests.helpers.own_steps import net
from tests.helpers.training import ROUNDING, distance, floats, from_logits, integers, use_float64
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.mpi]

ROWS, BATCH = 16, 8
WORDS = 12


class Pattern(NamedTuple):
    """A model and what it is trained with."""

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    loss: Any = "mse"
    metrics: Sequence[str] = ("mae",)
    own_step: bool = False
    evaluated: bool = False  # training and evaluation are not the same computation


def of(*shape: int, seed: int = 0) -> Any:
    return floats(*shape, seed=seed)[:ROWS]


def ids(*shape: int, seed: int = 0) -> Any:
    return integers(WORDS, *shape, seed=seed)[:ROWS]


class TransformerBlock(layers.Layer):
    """Attention and a small net, with a rate of dropout that is zero."""

    def __init__(self, size: int, heads: int, **options: Any) -> None:
        super().__init__(**options)
        self.size, self.heads = size, heads
        self.attends = layers.MultiHeadAttention(heads, size // heads, use_bias=False)
        self.net = keras.Sequential([layers.Dense(2 * size, activation="gelu"), layers.Dense(size)])
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
        self.drop = layers.Dropout(0.0)

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = self.first(x + self.drop(self.attends(x, x), training=training))
        return self.second(x + self.drop(self.net(x), training=training))


class Distance(layers.Layer):
    """How far two vectors are from each other."""

    def call(self, pair: Any) -> Any:
        first, second = pair
        return ops.sqrt(ops.sum(ops.square(first - second), axis=1, keepdims=True) + 1e-7)


def siamese() -> keras.Model:
    """Whose towers are one nested model of two."""
    encoder, decoder = net(6, 5, 2), net(2, 5, 4)
    tower = keras.Model(encoder.inputs, decoder(encoder.outputs[0]))
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    far = Distance()([tower(left), tower(right)])
    return keras.Model([left, right], layers.Dense(1, activation="sigmoid")(far))


class Endpoint(layers.Layer):
    """Takes the targets as an input and adds the loss itself, as endpoints of CTC do."""

    def call(self, y: Any, y_pred: Any) -> Any:
        lengths = ops.ones((ops.shape(y)[0],), dtype="int32")
        value = ops.ctc_loss(y, y_pred, lengths * 2, lengths * 5, mask_index=0)
        self.add_loss(ops.mean(value))
        return y_pred


def ctc() -> keras.Model:
    sound = keras.Input((5, 6), name="sound")
    labels = keras.Input((2,), dtype="int32", name="labels")
    x = layers.Conv1D(4, 3, padding="same", activation="relu")(sound)
    x = layers.Dense(5)(layers.Dense(6, "relu")(x))
    return keras.Model([sound, labels], Endpoint()(labels, x))


class Patches(layers.Layer):
    """Cuts an image in patches."""

    def call(self, images: Any) -> Any:
        patches = ops.image.extract_patches(images, size=4)
        shape = ops.shape(patches)
        return ops.reshape(patches, (shape[0], shape[1] * shape[2], patches.shape[-1]))


class PatchEncoder(layers.Layer):
    """Projects patches, and adds where they are."""

    def __init__(self, count: int, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.count, self.size = count, size
        self.project, self.places = layers.Dense(size), layers.Embedding(count, size)

    def call(self, patches: Any) -> Any:
        places = ops.expand_dims(ops.arange(start=0, stop=self.count, step=1), axis=0)
        return self.project(patches) + self.places(places)


def vision_transformer() -> keras.Model:
    steps = Patches(), PatchEncoder(4, 8), TransformerBlock(8, 2)
    end = layers.LayerNormalization(epsilon=1e-6), layers.Flatten(), layers.Dense(5, "gelu")
    return chain((8, 8, 3), *steps, *end, layers.Dense(3))


def sequence_to_sequence() -> keras.Model:
    source, target = keras.Input((None, 5), name="source"), keras.Input((None, 4), name="target")
    _, *states = layers.LSTM(6, return_state=True)(source)
    decoded, _, _ = layers.LSTM(6, return_sequences=True, return_state=True)(
        target, initial_state=states
    )
    return keras.Model([source, target], layers.Dense(4, activation="softmax")(decoded))


def two_towers() -> keras.Model:
    user, item = keras.Input((), dtype="int32", name="user"), keras.Input((3,), dtype="int32")
    items = layers.Embedding(WORDS, 5, name="items")
    x = layers.Dense(5, "relu")(layers.Embedding(WORDS, 5)(user))
    y = layers.Dense(5, "relu")(ops.mean(items(item), axis=1))
    return keras.Model([user, item], 5.0 * layers.Dot(axes=1, normalize=True)([x, y]))


class Latents(layers.Layer):
    """A learned array that reads what there is, as the Perceiver's does."""

    def __init__(self, count: int, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.count, self.size = count, size

    def build(self, shape: Any) -> None:
        self.latents = self.add_weight(
            shape=(self.count, self.size), initializer="random_normal", name="latents"
        )

    def call(self, x: Any) -> Any:
        return ops.broadcast_to(self.latents, (ops.shape(x)[0], self.count, self.size))


def perceiver() -> keras.Model:
    inputs = keras.Input((7, 4))
    x = layers.Dense(8)(inputs)
    latents = Latents(3, 8)(x)
    reads, computes, norm = layers.Attention(), layers.Dense(8, "gelu"), layers.LayerNormalization()
    for _ in range(2):  # by the same layers
        latents = computes(norm(reads([latents, x]) + latents))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(latents)))


class Sampling(layers.Layer):
    """Mean and a little of the deviation: what it draws is zero, so that any cut draws the same."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        drawn = keras.random.normal(ops.shape(mean), stddev=0.0, seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * drawn


class VAE(keras.Model):
    """An autoencoder with trackers of its own and a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        inputs = keras.Input((6,))
        x = layers.Dense(5, "relu")(inputs)
        mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
        self.encoder = keras.Model(
            inputs, [mean, log_variance, Sampling()([mean, log_variance])], name="encoder"
        )
        self.decoder = net(2, 5, 6)
        self.total_tracker = keras.metrics.Mean(name="loss")
        self.kl_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total_tracker, self.kl_tracker]

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x)[2])

    def _told(self, data: Any) -> tuple[Any, dict[str, Any]]:
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        mean, log_variance, z = self.encoder(x)
        far = ops.mean(ops.sum(ops.square(x - self.decoder(z)), axis=1))
        kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        kl = ops.mean(ops.sum(kl, axis=1))
        self.total_tracker.update_state(far + kl)
        self.kl_tracker.update_state(kl)
        return far + kl, {tracker.name: tracker.result() for tracker in self.metrics}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            total, told = self._told(data)
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return told

    def test_step(self, data: Any) -> dict[str, Any]:
        return self._told(data)[1]


class Distiller(keras.Model):
    """A student that learns from targets and from a teacher that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = net(6, 8, 3)
        self.student = net(6, 4, 3)
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        softly = ops.softmax(self.teacher(x, training=False) / 3.0)
        taught = keras.losses.kl_divergence(softly, ops.softmax(y_pred / 3.0))
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 0.3 * own + 0.7 * 9.0 * ops.mean(taught)


def one_hot(*shape: int) -> Any:
    return np.eye(4)[integers(4, *shape)[:ROWS]]


CLASSES, SIGNS = integers(3)[:ROWS], integers(2, 1)[:ROWS]
PATTERNS = {
    "siamese": Pattern(siamese, [of(6), of(6, seed=1)], SIGNS, "binary_crossentropy"),
    "ctc": Pattern(ctc, [of(5, 6), 1 + integers(4, 2)[:ROWS]], None, None, ()),
    "vit": Pattern(
        vision_transformer, of(8, 8, 3), CLASSES, from_logits, ("accuracy",), evaluated=True
    ),
    "sequences": Pattern(
        sequence_to_sequence, [of(5, 5), one_hot(6)], one_hot(6), "categorical_crossentropy"
    ),
    "two_towers": Pattern(two_towers, [ids(), ids(3, seed=1)], of(1)),
    "perceiver": Pattern(perceiver, of(7, 4), of(2, seed=1), "huber"),
    "vae": Pattern(VAE, of(6), None, None, (), own_step=True, evaluated=True),
    "distiller": Pattern(
        Distiller, of(6), CLASSES, from_logits, ("accuracy",), own_step=True, evaluated=True
    ),
}


class Halving(keras.callbacks.Callback):
    """Halves the learning rate, and evaluates on all samples besides, after each epoch."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.5)
        found = self.model.evaluate(self.x, self.y, batch_size=BATCH, verbose=0, return_dict=True)
        logs.update({f"besides_{name}": float(value) for name, value in found.items()})


def trained(pattern: Pattern, wrap: Callable[[Any], Any] | None = None) -> Any:
    """What comes of a pattern: logs, weights and perhaps predictions."""
    use_float64()
    loss = pattern.loss() if callable(pattern.loss) else pattern.loss
    optimizer = keras.optimizers.Adam(1e-2) if pattern.own_step else keras.optimizers.SGD(0.05)
    metrics = list(pattern.metrics) or None
    model = training.begun(pattern.build, wrap, optimizer, loss, seed=4, metrics=metrics)
    x, y = pattern.x, pattern.y
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    if pattern.evaluated:
        validation = x[:BATCH], None if y is None else y[:BATCH]
        callbacks = [Halving(x, y), keras.callbacks.EarlyStopping("loss")]
        options |= {"epochs": 2, "validation_data": validation, "callbacks": callbacks}
    found = {"history": model.fit(x, y, **options).history}
    if pattern.evaluated:
        found["predictions"] = model.predict(x, batch_size=BATCH, verbose=0).tolist()
    return {**found, "weights": [weight.tolist() for weight in model.get_weights()]}


def two_stages(model: keras.Model) -> tnt.PipelineModel:
    return tnt.PipelineModel(model, 2, num_micro_batches=2)


def on_ranks() -> Any:
    """Each pattern that can be cut as a pipeline, the others as replicas."""
    return {
        name: trained(pattern, tnt.Model if pattern.own_step else two_stages)
        for name, pattern in PATTERNS.items()
    }


@pytest.mark.slow
def test_patterns_of_keras_examples_train_as_in_one_process() -> None:
    first, second = mpi_run(2, on_ranks, timeout=400).check().results
    assert first == second
    far = {}
    for name, found in first.items():
        plain = trained(PATTERNS[name])
        assert len(plain["history"]["loss"]) == 1 + PATTERNS[name].evaluated
        if name == "ctc":
            # TensorFlow computes CTC in float32, and other sums round otherwise there.
            far[name] = distance(found["history"], plain["history"]) * ROUNDING / 1e-6
        else:
            far[name] = distance(found, plain)
    assert max(far.values()) < ROUNDING, far
