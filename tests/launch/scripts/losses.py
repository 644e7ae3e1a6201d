"""Trains a pipeline of all ranks, and replicas of all ranks, and prints losses to the last bit."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

import tarantella_pp as tnt

ROWS, BATCH = 24, 12


def train(**options: object) -> list[float]:
    """Returns the losses of three epochs, in float64, and that of all rows afterwards."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("float64")
    draw = np.random.default_rng(2)
    x, y = draw.normal(size=(ROWS, 8)), draw.normal(size=(ROWS, 2))
    inner = [keras.layers.Dense(16, activation="tanh") for _ in range(5)]
    whole = keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(2)])
    model = tnt.PipelineModel(whole, batch_size=BATCH, **options)
    model.compile(keras.optimizers.AdamW(1e-2), "mse")
    history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    return [*history.history["loss"], model.evaluate(x, y, batch_size=BATCH, verbose=0)]


def losses(num_ranks: int) -> list[list[float]]:
    """Returns the losses of both ways."""
    pipeline = train(num_stages=num_ranks, num_micro_batches=3, schedule="1f1b")
    return [pipeline, train(num_stages=1, num_replicas=num_ranks, num_micro_batches=1)]


if __name__ == "__main__":
    found = losses(tnt.get_size())
    if tnt.is_master_rank():
        print("losses", *(loss.hex() for way in found for loss in way))
