"""Trains with checkpoints: killed at any moment and started again, it comes to the same losses.

    tarantella -n 2 -- examples/resume.py --directory run --kill-at 7     killed after 7 steps
    tarantella -n 2 -- examples/resume.py --directory run                 goes on with step 5 or 7
    python examples/resume.py --directory run --epochs 6                  two more, in one process
    tarantella checkpoint show run

It learns a smooth function of two numbers, with dropout, shuffling and a falling learning rate.
"""

from __future__ import annotations

import argparse
import os
import signal

import keras
import numpy as np

import tarantella_pp as tnt

SAMPLES, BATCH, STAGES = 256, 64, 2


def build_model(width: int = 32) -> keras.Model:
    """Builds a perceptron."""
    inputs = keras.Input((2,))
    x = keras.layers.Dense(width, "tanh")(inputs)
    x = keras.layers.Dropout(0.1)(x)
    x = keras.layers.Dense(width, "tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


class KillAt(keras.callbacks.Callback):
    """Kills the last rank after so many steps, as a failing machine would."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Kills this process, if it is time to."""
        if int(self.model.optimizer.iterations) == self._step and tnt.is_master_rank():
            os.kill(os.getpid(), signal.SIGKILL)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--directory", default="checkpoints", help="where checkpoints are (default: checkpoints)")
    add("--epochs", type=int, default=4, help="number of the last epoch (default: 4)")
    add("--every", type=int, default=2, help="steps from checkpoint to checkpoint (default: 2)")
    add("--kill-at", type=int, default=0, help="kill a rank after so many steps (default: never)")
    return parser.parse_args()


def main() -> None:
    """Trains, or goes on, and prints the losses of all epochs."""
    args = parse_arguments()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(1).uniform(-2, 2, size=(SAMPLES, 2))
    y = np.sin(x[:, :1]) * np.cos(x[:, 1:])

    replicas = max(1, tnt.get_size() // STAGES)
    model = tnt.PipelineModel(
        build_model(),
        num_stages=STAGES,
        num_micro_batches=4 // replicas,  # dropout draws once for each of all four
        batch_size=BATCH,
    )
    rate = keras.optimizers.schedules.ExponentialDecay(1e-2, decay_steps=4, decay_rate=0.9)
    model.compile(keras.optimizers.Adam(rate), "mse")
    callbacks = [tnt.callbacks.Checkpoint(args.directory, every=args.every)]
    if args.kill_at:
        callbacks.append(KillAt(args.kill_at))
    told = model.fit(x, y, batch_size=BATCH, epochs=args.epochs, verbose=0, callbacks=callbacks)
    if tnt.is_master_rank():
        for epoch, loss in enumerate(told.history["loss"], 1):
            print(f"loss: {loss:.6f} in epoch {epoch}")


if __name__ == "__main__":
    main()
