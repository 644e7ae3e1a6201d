"""Models whose shapes come with the data: they keep what they were told until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import keras

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.models.feeding.first_shapes import inputs_of_data, inputs_of_shape
from tarantella_pp.runtime.comm.communicator import world

Make = Callable[[Any], None]
"""Makes the model what it is to be, given symbolic inputs."""


def wait_for_shapes(model: Any, make: Make) -> None:
    """Lets a model that cannot be planned yet wait for data, or for `build()`."""
    kind = type(model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    waits = type(kind.__name__, (UnbuiltModel, kind), {**names, "__doc__": kind.__doc__})
    vars(model)["_waiting"] = {"kind": kind, "make": make, "build": vars(model).pop("build")}
    model.__class__ = waits


def _needs_shapes(name: str) -> Any:
    def refused(model: Any, *_: Any, **__: Any) -> NoReturn:
        raise ConfigurationError(
            f"`{name}` needs a model that is built, and the shapes of this one are not known yet. "
            "Call `build(input_shape)`, or `fit`, `evaluate` or `predict` with data, first."
        )

    return refused


def _reads_data(name: str) -> Any:
    def run(model: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        x = model._build_for(name, x)
        return getattr(model, name)(x, *args, **kwargs)

    return run


class UnbuiltModel:
    """What is put before the class of a model until its shapes are known."""

    _waiting: dict[str, Any]

    fit = _reads_data("fit")
    evaluate = _reads_data("evaluate")
    predict = _reads_data("predict")
    train_on_batch = _reads_data("train_on_batch")
    test_on_batch = _reads_data("test_on_batch")
    predict_on_batch = _reads_data("predict_on_batch")
    plan = property(_needs_shapes("plan"))
    layers = property(_needs_shapes("layers"))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Keeps what the model is to be compiled with once it is built."""
        if args:
            args = (keras.optimizers.get(args[0]), *args[1:])
        elif "optimizer" in kwargs:
            kwargs["optimizer"] = keras.optimizers.get(kwargs["optimizer"])
        self._waiting["compile"] = args, kwargs

    @property
    def compiled(self) -> bool:
        """Whether `compile` has been called."""
        return "compile" in self._waiting

    @property
    def optimizer(self) -> Any:
        """The optimizer that the model is to be compiled with; `None` for none."""
        args, kwargs = self._waiting.get("compile", ((), {}))
        return args[0] if args else kwargs.get("optimizer")

    def build(self, input_shape: Any) -> None:
        """Builds the model and makes its plan; all ranks must call it."""
        with world().call("build", input_shape=input_shape):
            self._become(inputs_of_shape(input_shape))

    def _build_for(self, method: str, x: Any) -> Any:
        """Builds the model for the data of a call; returns what the call is to be given."""
        ranks = world()
        with ranks.call(f"{method} (build)"):
            inputs, data = inputs_of_data(x, ranks)
            self._become(inputs)
        return data

    def _become(self, inputs: Any) -> None:
        """Makes the model what it is to be; if that fails, it goes on waiting."""
        before, waits = dict(vars(self)), type(self)
        waiting = vars(self).pop("_waiting")
        vars(self)["build"] = waiting["build"]
        self.__class__ = waiting["kind"]
        try:
            waiting["make"](inputs)
            if "compile" in waiting:
                args, kwargs = waiting["compile"]
                self.compile(*args, **kwargs)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            self.__class__ = waits
            raise


for _name in (
    *("summary", "call", "get_weights", "set_weights", "get_config", "to_json", "save"),
    *("save_weights", "load_weights", "get_state_tree", "set_state_tree", "export"),
    *("train_step", "test_step", "predict_step", "compute_metrics", "reset_metrics"),
):
    setattr(UnbuiltModel, _name, _needs_shapes(_name))
