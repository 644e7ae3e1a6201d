"""Trains with checkpoints; when the last rank comes to step 5 it kills itself, once.

restarted.py FOLDER       leaves a file `killed` in it
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import tarantella_pp as tnt

killed, trained = Path(sys.argv[1], "killed"), []


class Killed(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        trained.append(batch)
        if self.model.optimizer.iterations == 5 and tnt.get_rank() == 2:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


stack = [keras.layers.Dense(4, activation="tanh") for _ in range(2)]
network = keras.Sequential([keras.Input((4,)), *stack, keras.layers.Dense(2)])
model = tnt.PipelineModel(network, num_stages=3, num_micro_batches=2)
model.compile("adam", "mse")
x, fit = np.ones((20, 4)), {"batch_size": 4, "epochs": 2, "verbose": 0}
with contextlib.suppress(tnt.errors.ConfigurationError):
    model.fit(x, x[:, :2], **fit)  # a script that goes on after a refusal is started again, too
own = tnt.callbacks.Checkpoint(Path(sys.argv[1], "run"), every=2)
model.fit(x, x[:, :2], **fit, callbacks=[own, Killed()])
steps = f"{len(trained)} of {int(model.optimizer.iterations)} steps"
print(f"{tnt.get_size()} ranks, {model.plan.num_stages} stages, {steps}")
