"""A pytest plugin: makes a pipeline, in place, of each model that a test of Keras trains.

`keras_tests.py` loads it. A model of Keras becomes a `PipelineModel` of itself when it is compiled,
or first used, so that the rest of the test has a pipeline in its hands. What Keras' tests make of
a single layer and a trainer becomes a Functional of that layer first.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from typing import Any

import keras
import pytest
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.trainer import Trainer

from tarantella_pp.errors import TarantellaError, UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.partition.graph.keras_reader import extract

WRAPS = os.environ["KERAS_TESTS"] == "wrapped"
REPORT = os.environ["KERAS_TESTS_REPORT"]
USES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
OTHERS = ("compile", "save", "save_weights", "load_weights", "export", "train_step", "test_step")
OWN = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


class Watch:
    """What happens in the test that runs.

    Attributes:
        trains: Whether it uses a model.
        refusal: The first error of the library.
        converts: The model that is to become a pipeline, while one is made.
        inside: Whether the library itself uses models now.
    """

    trains = False
    refusal = ""
    converts: Any = None
    inside = False


def make_in_place(kind: type, *_: Any, **__: Any) -> Any:
    """Stands for `object.__new__`: a new pipeline takes the place of the model it is made of."""
    if kind is not PipelineModel or Watch.converts is None:
        return object.__new__(kind)
    model, Watch.converts = Watch.converts, None
    model.__dict__.clear()
    model.__class__ = PipelineModel
    return model


def copy_of(model: Any) -> Any:
    """The model as it is, under another identity."""
    copy = object.__new__(type(model))
    copy.__dict__.update(model.__dict__)
    for name in ("build", "quantize"):  # those are bound to the first one
        copy.__dict__.pop(name, None)
    return copy


def source_of(model: Any, x: Any) -> keras.Model:
    """The model to make a pipeline of."""
    if isinstance(model, keras.Sequential) and not model.built and hasattr(x, "shape"):
        model.build((None, *x.shape[1:]))
    if isinstance(model, keras.Model):
        return copy_of(model)
    if any(getattr(type(model), name) is not getattr(TensorFlowTrainer, name) for name in OWN):
        raise UnsupportedModelError("a single layer that overrides a step")
    if any(isinstance(value, keras.metrics.Metric) for value in public(model)):
        raise UnsupportedModelError("a single layer with metrics of its own")
    if not all(hasattr(leaf, "shape") for leaf in keras.tree.flatten(x)):
        raise UnsupportedModelError("a single layer, and data that does not say its shape")
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(model.dtype_policy)
    try:
        inputs = keras.tree.map_structure(lambda leaf: keras.Input(leaf.shape[1:]), x)
        return keras.Model(inputs, copy_of(model)(inputs))
    finally:
        keras.config.set_dtype_policy(policy)


def public(model: Any) -> list[Any]:
    """What the model's own code has put into attributes."""
    return [value for name, value in vars(model).items() if not name.startswith("_")]


def convert(model: Any, x: Any = None) -> None:
    """Makes a pipeline of a model: of two stages, if it has as many operations."""
    compilation = model.__dict__.get("_asked_of_compile")
    kept = model.__class__, dict(model.__dict__)
    Watch.inside = True
    try:
        source = source_of(model, x)
        stages = min(2, len(extract(source).graph.nodes))
        Watch.converts = model
        PipelineModel(source, num_stages=stages, num_micro_batches=2)
    except BaseException as error:
        model.__class__ = kept[0]
        model.__dict__.clear()
        model.__dict__.update(kept[1])
        note(error)
        raise
    finally:
        Watch.inside, Watch.converts = False, None
    if compilation is not None:
        model.compile(*compilation[0], **compilation[1])


def note(error: BaseException) -> None:
    if isinstance(error, TarantellaError):
        Watch.refusal = Watch.refusal or str(error)


def first_of(data: Any) -> Any:
    """The inputs of a batch."""
    if hasattr(data, "element_spec"):
        data = data.element_spec
    elif isinstance(data, keras.utils.PyDataset):
        data = data[0]
    else:
        return data
    return data[0] if isinstance(data, tuple) else data


def watch_use(name: str) -> None:
    """Has a method of all models noted, and wrap the model first."""
    original = getattr(TensorFlowTrainer, name)

    @functools.wraps(original)
    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        Watch.trains = True
        if WRAPS and not Watch.inside and not isinstance(self, PipelineModel):
            convert(self, first_of(args[0] if args else kwargs.get("x")))
            return getattr(self, name)(*args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(TensorFlowTrainer, name, use)


def watch_errors(name: str) -> None:
    """Has what a method of a pipeline refuses noted."""
    original = getattr(PipelineModel, name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        Watch.trains = True
        try:
            return original(self, *args, **kwargs)
        except TarantellaError as error:
            note(error)
            raise

    setattr(PipelineModel, name, call)


def compile_later(original: Any) -> Any:
    """What `compile` does instead: a built model that a test compiles becomes a pipeline."""

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        if Watch.inside or isinstance(self, PipelineModel):
            original(self, *args, **kwargs)
            return
        self.__dict__["_asked_of_compile"] = (args, kwargs)
        by_test = sys._getframe(1).f_code.co_filename.endswith("_test.py")
        if by_test and isinstance(self, keras.Model) and self.built:
            convert(self)
        else:
            original(self, *args, **kwargs)

    return compile


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras")
    config.addinivalue_line("markers", "multi_device: of Keras")
    for name in USES:
        watch_use(name)
    sys.modules.setdefault("jax", types.ModuleType("jax"))  # some tests import and do not use it
    if WRAPS:
        KerasSaveable.__new__ = make_in_place
        Trainer.compile = compile_later(Trainer.compile)
        for name in (*USES, *OTHERS):
            watch_errors(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not hasattr(sys.modules["jax"], "__path__"):
        del sys.modules["jax"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    Watch.trains, Watch.refusal = False, ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        facts = (item.nodeid, report.outcome, Watch.trains, Watch.refusal, error)
        with open(REPORT, "a") as lines:
            lines.write(json.dumps(facts) + "\n")
    return report
