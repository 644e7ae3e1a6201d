"""Models whose class prepares the data around Keras' loops, as KerasHub's tasks do."""

import keras
import numpy as np
import tensorflow as tf

TEXTS = ["a plane", "an airport", "at", "a port at an airport", "", "plane at a port", "planes"]


def letters(texts):
    """Numbers of the first six letters of each text, and a weight for each of them."""
    codes = tf.io.decode_raw(tf.strings.substr(texts + "      ", 0, 6), "uint8")
    return tf.cast(codes, "int32") % 16, tf.cast(codes != 32, keras.config.floatx())


@keras.saving.register_keras_serializable("tests")
class Task(keras.Model):
    """Says of each letter which one comes next; takes texts, and gives numbers of letters."""

    def __init__(self, width=4, **kwargs):
        self.head = keras.layers.Dense(16)  # its weights come first, as of attributes set so early
        inputs = keras.Input((5,), dtype="int32", name="ids")
        x = keras.layers.Embedding(16, width)(inputs)
        x = keras.layers.Dense(width, activation="tanh")(x)
        super().__init__(inputs, self.head(x), **kwargs)
        self.width = width
        self.preprocessor = letters
        self.compile()

    def compile(self, optimizer=None, loss="auto", sampler="greedy", **kwargs):
        if loss == "auto":
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        kwargs.setdefault("weighted_metrics", ["accuracy"])
        super().compile(optimizer or keras.optimizers.Adam(0.02), loss, **kwargs)
        self.sampler = sampler

    def __call__(self, inputs, *args, **kwargs):
        if isinstance(inputs, str):
            raise TypeError("a task is called with numbers")
        return super().__call__(inputs, *args, **kwargs)

    def prepared(self, texts):
        if self.preprocessor is None:
            return texts
        codes, weights = self.preprocessor(texts)
        return codes[:, :-1], codes[:, 1:], weights[:, 1:]

    def data_of(self, x, batch_size=None):
        if not isinstance(x, tf.data.Dataset):
            x = tf.data.Dataset.from_tensor_slices(x).batch(batch_size or 32)
        return x.map(self.prepared)

    def fit(self, x, batch_size=None, validation_data=None, **kwargs):
        if validation_data is not None:
            validation_data = self.data_of(validation_data, batch_size)
        data = self.data_of(x, batch_size)
        return super().fit(data, validation_data=validation_data, shuffle=False, **kwargs)

    def evaluate(self, x=None, batch_size=None, **kwargs):
        if "_use_cached_eval_dataset" not in kwargs:
            x = self.data_of(x, batch_size)
        return super().evaluate(x, **kwargs)

    def predict(self, x, batch_size=None, **kwargs):
        return np.argmax(super().predict(self.data_of(x, batch_size), **kwargs), axis=-1)

    def train_on_batch(self, x, **kwargs):
        return super().train_on_batch(*self.prepared(x), **kwargs)

    def next_letters(self, text):
        """What a task generates by itself, with all of its weights."""
        return np.argmax(self(self.prepared(tf.constant([text]))[0]), axis=-1).tolist()

    def get_config(self):
        return {"width": self.width, "name": self.name}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


class Scaled(Task):
    """Its `__call__` does more than look."""

    def __call__(self, inputs, *args, **kwargs):
        return 2.0 * super().__call__(inputs, *args, **kwargs)
