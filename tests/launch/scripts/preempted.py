"""Trains slowly with checkpoints; says when it has begun, and in the end whether it was resumed."""

import logging
import sys
import time

import keras
import numpy as np

import tarantella_pp as tnt

tnt.init()
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, force=True)
keras.utils.set_random_seed(1)
plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model = tnt.PipelineModel(plain, num_stages=2, num_micro_batches=1)
model.compile("adam", "mse")
SECONDS = float(sys.argv[2])


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and tnt.get_rank() == 0:
            sys.stderr.write("ready\n")
        time.sleep(SECONDS)


x = np.ones((400, 3))
own = tnt.callbacks.Checkpoint(sys.argv[1])
model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[own, Slow()])
print("steps:", int(model.optimizer.iterations))
