"""`OnOneRank`: callbacks that report somewhere, once for the whole job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.optimizers import settable_learning_rate
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.weights.remote_variables import read_with
from tarantella_pp.runtime.weights.shared_weights import ValueStream

# The other ranks wait meanwhile, and hand over the weights that are looked at.
_TOGETHER = ("train", "epoch", "test", "predict")
# These begin and end in the middle of steps, where nobody waits.
_ALONE = ("batch", "train_batch", "test_batch", "predict_batch")
_FLAGS = ("stop_training", "stop_evaluating", "stop_predicting")


class OnOneRank(keras.callbacks.Callback):
    """Runs a callback that reports, of a logger or a tracking service, on the last rank only.

    At the beginning and the end of epochs and of `fit`, `evaluate` and `predict` the other ranks
    wait for it, so it may read all weights there, `layer.get_weights()` for histograms, say. They
    come one at a time from the ranks that have them.

    It must neither stop training nor set the learning rate, nor call what takes all ranks, such as
    `model.save`: that is refused by name. Its logs are its own. All ranks must pass an `OnOneRank`.

    Args:
        callback: The callback; or a function without arguments that makes it, which only that rank
            calls: for callbacks that need a session that is open.

    Raises:
        ConfigurationError: If the callback is one that all ranks need; in training, if it does what
            all ranks must do.

    Example::

        model.fit(x, y, callbacks=[tnt.callbacks.OnOneRank(make_logger)])
    """

    def __init__(
        self, callback: keras.callbacks.Callback | Callable[[], keras.callbacks.Callback]
    ) -> None:
        super().__init__()
        ranks = world()
        kind, made = keras.callbacks.Callback, callback
        if callable(callback) and not isinstance(callback, kind):
            made = callback() if ranks.prints else kind()
        if not isinstance(made, kind):
            raise ConfigurationError(
                "OnOneRank takes a callback of Keras, or a function that makes one. Received: "
                f"callback={made!r}"
            )
        self.callback = made

    def set_params(self, params: Any) -> None:
        """Hands on what the loop says of itself."""
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Hands on the model."""
        super().set_model(model)
        self.callback.set_model(model)

    def _together(self, hook: str, *args: Any, **kwargs: Any) -> None:
        engine, ranks = getattr(self.model, "_engine", None), world()
        if engine is None or ranks.size == 1:
            getattr(self.callback, hook)(*args, **kwargs)
            return
        stream = ValueStream(ranks, ranks.size - 1)
        reading = read_with(engine.weights.reader(stream))

        def work() -> None:
            with reading:
                self._alone(hook, *args, **kwargs)

        stream.read_while(f"run {type(self.callback).__name__}", work)

    def _alone(self, hook: str, *args: Any, **kwargs: Any) -> None:
        ranks = world()
        if ranks.prints:
            own = [dict(one) if isinstance(one, dict) else one for one in args]
            with self._refusing(ranks):
                getattr(self.callback, hook)(*own, **kwargs)

    @contextlib.contextmanager
    def _refusing(self, ranks: Communicator) -> Iterator[None]:
        """Refuses what all ranks must do."""
        if ranks.size == 1:
            yield
            return
        name, model = type(self.callback).__name__, self.model
        flags = {flag: bool(getattr(model, flag, False)) for flag in _FLAGS}
        rate = settable_learning_rate(model)
        with ranks.alone(f"Callback {name}"):
            yield
        done = [
            f"sets {flag}" for flag in _FLAGS if bool(getattr(model, flag, False)) != flags[flag]
        ]
        if rate == rate != settable_learning_rate(model):  # NaN where a schedule sets it
            done.append("sets the learning rate")
            model.optimizer.learning_rate = rate
        if done:
            for flag, value in flags.items():
                setattr(model, flag, value)
            raise ConfigurationError(
                f"Callback {name} {done[0]}, which all ranks must do. Pass it without OnOneRank."
            )


for _parts, _runs in ((_TOGETHER, OnOneRank._together), (_ALONE, OnOneRank._alone)):
    for _name in (f"on_{part}_{when}" for part in _parts for when in ("begin", "end")):
        setattr(OnOneRank, _name, functools.partialmethod(_runs, _name))
