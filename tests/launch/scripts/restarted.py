"""Trains with checkpoints; after each STEP that RANK kills itself, once; compares with plain Keras.

restarted.py FOLDER STAGES STEP-RANK...       leaves files of these names in FOLDER
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import tarantella_pp as tnt

folder, stages, *moments = sys.argv[1:]
keras.config.set_floatx("float64")


def network():
    keras.utils.set_random_seed(1)
    stack = [keras.layers.Dense(4, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((4,)), *stack, keras.layers.Dense(2)])


class Killed(keras.callbacks.Callback):
    """Does as the arguments say."""

    def on_train_batch_end(self, batch, logs=None):
        moment = f"{int(self.model.optimizer.iterations)}-{tnt.get_rank()}"
        if moment in moments and not Path(folder, moment).exists():
            Path(folder, moment).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fitted(model, *callbacks):
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(20, 4)), draw.normal(size=(20, 2))
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=not callbacks)
    keras.utils.set_random_seed(1)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    return model.get_weights()


model = tnt.PipelineModel(network(), num_stages=int(stages), num_micro_batches=2)
if moments:  # a script that goes on after a refusal is started again as others are
    with contextlib.suppress(tnt.errors.ConfigurationError):
        fitted(model)
own = [tnt.callbacks.Checkpoint(Path(folder, "run"), every=2)] if moments else []
found = fitted(model, *own, Killed())
if tnt.is_master_rank():
    pairs = zip(found, fitted(network()), strict=True)
    worst = max(np.abs(ours - theirs).max() for ours, theirs in pairs)
    print(f"{tnt.get_size()} ranks, {model.plan.num_stages} stages, close: {worst < 1e-10}")
