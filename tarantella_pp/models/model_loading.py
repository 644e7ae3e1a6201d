"""`load_model` and `save_model`: files of whole models; each rank reads its share."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import keras

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.files.file_replacement import replace_file
from tarantella_pp.files.keras_file import KerasFile
from tarantella_pp.internals.model_files import deserialized
from tarantella_pp.models.model_building import built, compile_as, wrapped
from tarantella_pp.models.training_loops import TrainingLoops
from tarantella_pp.runtime.comm.collective import contents_of, on_all_ranks, on_one_rank
from tarantella_pp.runtime.comm.communicator import world

_FILES = (".keras", ".h5", ".hdf5")


def load_model(
    filepath: str | os.PathLike[str] | BinaryIO,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Loads a model that Keras or one of its distributed models has saved, distributed.

    All ranks must call it, and each reads the weights and the optimizer state of its own stages
    only, one variable at a time. So a model may be larger than the memory of any rank. The file may
    have been saved with any number of stages and replicas, or by plain Keras. What cannot be built
    by share (`tnt.deferred_init`), and legacy `.h5` files, every rank loads as a whole before it
    keeps its share, and the log says so.

    Args:
        filepath: Path of a `.keras` file, or of what else `keras.models.load_model` takes; or an
            open `.keras` file of each rank. Ranks may have files of their own, with equal contents.
        custom_objects: Classes and functions by their names, as in Keras.
        compile: Whether to compile the model as it was, with the state of its optimizer.
        safe_mode: Whether to refuse lambdas, as in Keras.
        **options: Of `tnt.PipelineModel`, such as `num_stages`; or of `tnt.Model` for a model that
            cannot be cut. Default: stages and replicas with which a step is fastest.

    Returns:
        A `tnt.PipelineModel`; for a subclassed model, or one with steps of its own, a `tnt.Model`.

    Raises:
        ConfigurationError: On all ranks, if the file is missing or damaged on one of them, differs
            between them, or does not fit, or an option cannot work.

    Example::

        model = tnt.models.load_model("model.keras", num_stages=4)
        model.fit(x, y)
    """
    objects = dict(custom_objects or {})
    whole = functools.partial(_whole, filepath, objects, compile, safe_mode)
    with contextlib.ExitStack() as stack:
        file = _agreed_file(filepath, stack, compile=bool(compile), safe_mode=bool(safe_mode))
        if file is None:
            reason = "only Keras reads files of this kind"
            model, _ = built(whole, "load_model", options, of=f"'{filepath}'", reason=reason)
            return wrapped(model, options)
        config = dict(file.config)
        compilation = config.pop("compile_config", None)
        model, by_share = built(
            lambda: deserialized(config, objects, safe_mode),
            "load_model", options, whole, of=f"the model of file {file.name}",
        )  # fmt: skip
        distributed = wrapped(model, options)
        if by_share:
            if compile:
                _compile(distributed, file, compilation, objects, safe_mode)
            with world().call("load_model (weights)"):
                distributed._read_state(file)
    return distributed


def save_model(
    model: Any, filepath: str | os.PathLike[str] | BinaryIO, overwrite: bool = True, **options: Any
) -> None:
    """Saves a model as `save` of a distributed model does; all ranks must call it.

    Of a model of plain Keras, which each rank has for itself, the last rank's is saved.

    Args:
        model: A distributed model, or one of plain Keras.
        filepath: Path of the file, or an open file of each rank.
        overwrite: Whether to replace an existing file.
        **options: What the model's `save` takes.

    Raises:
        ConfigurationError: On all ranks, if the model cannot be saved so.
        FileError: If the file cannot be written; an older one is unchanged.

    Example::

        tnt.models.save_model(model, "model.keras")
    """
    if isinstance(model, TrainingLoops) or isinstance(filepath, io.IOBase):
        model.save(filepath, overwrite=overwrite, **options)
        return
    ranks, path = world(), Path(os.fspath(filepath))  # type: ignore[arg-type]

    def write() -> None:
        if path.exists() and not overwrite:  # Keras asks whoever started it, who may be nobody
            raise ConfigurationError(
                f"File '{path}' exists. Received: overwrite=False. Choose another name, or pass "
                "overwrite=True."
            )
        if path.suffix not in _FILES:
            keras.saving.save_model(model, path, **options)
        else:
            replace_file(path, lambda draft: keras.saving.save_model(model, draft, **options))

    with ranks.call("save_model", overwrite=overwrite):
        on_one_rank(ranks, ranks.size - 1, f"save '{path}'", write)


def _agreed_file(filepath: Any, stack: contextlib.ExitStack, **facts: Any) -> KerasFile | None:
    """Opens a file that is the same on all ranks; `None` for one that only Keras reads."""
    ranks = world()
    opened = isinstance(filepath, io.IOBase)
    if not opened and not isinstance(filepath, (str, os.PathLike)):
        raise ConfigurationError(
            "load_model takes the path of a file, or an open one. Received: "
            f"filepath={filepath!r} of type {type(filepath).__name__}"
        )
    name = f"an open {type(filepath).__name__}" if opened else os.fspath(filepath)
    in_parts = opened or (name.endswith(".keras") and "://" not in name and not Path(name).is_dir())
    found: list[KerasFile] = []
    if not in_parts:
        with ranks.call("load_model", **facts, contents=contents_of(filepath)):
            return None

    def work() -> None:
        found.append(stack.enter_context(contextlib.closing(KerasFile(filepath))))

    with ranks.call("load_model", **facts):
        on_all_ranks(ranks, f"read '{name}'", work)
    with ranks.call("load_model (file)", contents=found[0].contents):
        return found[0]


def _compile(model: Any, file: KerasFile, compilation: Any, objects: Any, safe_mode: bool) -> None:
    """Compiles a model as a file says."""
    try:
        compile_as(model, compilation, objects, safe_mode)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The model of file {file.name} cannot be compiled as it was: {error} Load it with "
            "`compile=False`, and compile it otherwise."
        ) from error


def _whole(filepath: Any, objects: Any, compile_too: bool, safe_mode: bool) -> Any:
    """Loads a model of plain Keras, which takes the path of a file."""
    with contextlib.ExitStack() as stack:
        if isinstance(filepath, io.IOBase):
            file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".keras"))
            filepath.seek(0)
            shutil.copyfileobj(filepath, file)
            file.flush()
            filepath = file.name
        return keras.models.load_model(
            filepath, custom_objects=objects, compile=compile_too, safe_mode=safe_mode
        )
