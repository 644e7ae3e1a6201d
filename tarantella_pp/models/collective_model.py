"""Weights and files of a model that is spread over ranks, as Keras' own methods."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.files import replace_file
from tarantella_pp.internals.model_files import called_by_writer, hdf5_errors, twin_of
from tarantella_pp.models.keras_file import KerasFile, read_state, read_weights, write_plain
from tarantella_pp.models.model_validation import check_one_file, check_overwrite, path_of
from tarantella_pp.runtime.comm.collective import collective, contents_of, digest, on_all_ranks
from tarantella_pp.runtime.engine import Engine
from tarantella_pp.runtime.weights import remote_variables
from tarantella_pp.runtime.weights.optimizer_state import OptimizerState, StateShare
from tarantella_pp.runtime.weights.shared_weights import ValueStream

# Each rank reads what it needs of these files, and of others all.
_IN_PARTS = (".weights.h5", ".weights.json", ".keras")


class CollectiveModel(keras.Model):  # type: ignore[misc]
    """A Keras model whose weights are on the ranks of a pipeline, which must all call it."""

    _engine: Engine
    _optimizer_state: OptimizerState | None = None
    _is_built = False

    @property
    def built(self) -> bool:
        """Whether the model has its weights."""
        # `keras.saving` asks for this, and only for this, before it opens a file, which empties it.
        # So weights that are out of date are refused here: the older file stays whole.
        if called_by_writer():
            for variable in self.variables:
                remote_variables.check_readable(variable)
        return self._is_built

    @built.setter
    def built(self, value: bool) -> None:
        self._is_built = value

    @property
    def _wrapped(self) -> keras.Model:
        """The user's model, which has the weights."""
        return self._engine.extracted.model

    def _is_theirs(self, name: str) -> bool:
        """Whether only the wrapped model, of a class of the user's own, has an attribute."""
        if name.startswith("_") or "_engine" not in self.__dict__:
            return False
        ours = name in self.__dict__ or hasattr(type(self), name)
        is_stock = type(self._wrapped).__module__.startswith("keras.")
        return not ours and not is_stock and hasattr(self._wrapped, name)

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped model's class has, such as `generate` of a task."""
        return getattr(self._wrapped if self._is_theirs(name) else super(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what only the wrapped model has, such as the preprocessor of a task, there."""
        if self._is_theirs(name):
            setattr(self._wrapped, name, value)
        else:
            super().__setattr__(name, value)

    @collective()
    def gather(self) -> None:
        """Brings all weights up to date on every rank; all ranks must call it.

        Until the next training step each rank can use the wrapped model by itself then.

        Example::

            model.fit(texts, batch_size=8)
            model.gather()
            print(model.generate("Once upon a time"))  # of the wrapped `CausalLM`
        """
        self._engine.weights.gather()

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Returns all weights, on every rank; all ranks of several stages must call it."""
        if self._engine.groups.pipeline.size > 1:
            with self._engine.communicator.call("get_weights"):
                self._engine.weights.gather()
        return list(super().get_weights())

    @collective(weights=lambda given: digest(given["weights"]))
    def set_weights(self, weights: Any) -> None:
        """Sets all weights; all ranks must call it, with the same values."""
        super().set_weights(weights)

    def get_state_tree(self, *args: Any, **kwargs: Any) -> Any:
        """Returns weights and slots by name, where one process has all of them."""
        self._refuse_on_ranks("get_state_tree")
        return super().get_state_tree(*args, **kwargs)

    def set_state_tree(self, *args: Any, **kwargs: Any) -> None:
        """Sets weights and slots by name, where one process has all of them."""
        self._refuse_on_ranks("set_state_tree")
        super().set_state_tree(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Copies and pickles become plain Keras models, where one process has all of it."""
        self._refuse_on_ranks("A copy or pickle of a model")
        return super().__reduce__()

    def _refuse_on_ranks(self, what: str) -> None:
        if self._engine.communicator.size > 1:
            raise ConfigurationError(
                f"{what} needs all weights and slots in one process, and ranks share them out. "
                "Use `get_weights` and `set_weights`, or `save` and `load_weights`."
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the wrapped model."""
        return dict(self._wrapped.get_config())

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> keras.Model:
        """Makes a plain Keras model of the configuration of a wrapped one, with new weights."""
        kind = keras.Model if "input_layers" in config else keras.Sequential
        return kind.from_config(config, custom_objects=custom_objects)

    def to_json(self, **kwargs: Any) -> str:
        """Describes the wrapped model and its compilation, for `keras.models.model_from_json`."""
        return json.dumps(self._config(), **kwargs)

    @collective("filepath", "overwrite", "include_optimizer")
    def save(
        self,
        filepath: str | Path,
        overwrite: bool = True,
        zipped: bool | None = None,
        include_optimizer: bool = True,
        save_format: str | None = None,
    ) -> None:
        """Saves the wrapped model as plain Keras does; stock Keras loads it and trains on.

        All ranks must call it; the last one writes. The file replaces an older one only when it
        is complete. `tnt.models.save_model` does the same.
        """

        def write(draft: Path, state: Any) -> None:
            optimizer = state if include_optimizer else None
            plain = twin_of(self._wrapped, optimizer=optimizer)
            write_plain(plain, self._config(optimizer), draft)

        path = path_of(filepath)
        if path.suffix != ".keras" or save_format not in (None, "keras") or zipped is False:
            raise ConfigurationError(
                "A PipelineModel is saved as one file that ends in '.keras'. Received: filepath="
                f"'{filepath}', zipped={zipped}, save_format={save_format!r}. For other formats "
                "load that file with `keras.saving.load_model` in one process, and save it there."
            )
        self._on_last_rank("save", path, overwrite, write)

    @collective("filepath", "overwrite", "max_shard_size")
    def save_weights(
        self, filepath: str | Path, overwrite: bool = True, max_shard_size: float | None = None
    ) -> None:
        """Saves the weights as plain Keras does; all ranks must call it, the last one writes.

        The file replaces an older one only when it is complete.
        """
        check_one_file(max_shard_size)

        def write(draft: Path, state: Any) -> None:
            keras.Model.save_weights(twin_of(self._wrapped, optimizer=state), draft)

        self._on_last_rank("save_weights", path_of(filepath), overwrite, write)

    @collective("skip_mismatch", contents=lambda given: contents_of(given["filepath"]))
    def load_weights(
        self, filepath: str | Path, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Loads weights as plain Keras does, each rank those that it needs; all must call it."""
        plain, needed = self._receiving()
        in_parts = not kwargs and str(filepath).endswith(_IN_PARTS)

        def work() -> None:
            if in_parts:
                read_weights(Path(filepath), plain, needed, skip_mismatch)
                return
            with remote_variables.only_own_assigned():
                plain.load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

        on_all_ranks(self._engine.communicator, f"load '{filepath}'", work)

    def _read_state(self, file: KerasFile) -> None:
        """Takes over what a whole model's file has; all ranks must call it, alike."""
        if self._optimizer_state is not None:
            self._optimizer_state.build()
        plain, needed = self._receiving()
        work = functools.partial(read_state, file, plain, needed)
        on_all_ranks(self._engine.communicator, f"load {file.name}", work)

    def _receiving(self) -> tuple[keras.Model, list[Any]]:
        """What takes over a state, and this rank's variables; all ranks must call it."""
        state = self._optimizer_state
        plain = twin_of(self._wrapped, optimizer=state and state.receiver())
        return plain, list(self._engine.weights.needed().values())

    def _state_share(self) -> StateShare:
        """What of the state of training this rank has, to write it or to read it."""
        metrics = self._engine.shared_logs.metric_variables
        return StateShare(self._engine.weights, self._optimizer_state, metrics)

    def _on_last_rank(
        self, what: str, path: Path, overwrite: bool, write: Callable[[Path, Any], None]
    ) -> None:
        """Lets the last rank write a file, while the others hand it values one at a time."""
        communicator = self._engine.communicator
        last = communicator.size - 1  # which may see another file system
        check_overwrite(path, communicator.broadcast_json(path.exists(), last), overwrite)
        self._engine.check_alike()  # replicas that a loop of the user's own has let drift apart
        stream = ValueStream(communicator, last)
        read = self._engine.weights.reader(stream)
        state = self._optimizer_state and self._optimizer_state.streamed(stream)

        def work() -> None:
            with remote_variables.read_with(read):
                replace_file(path, hdf5_errors()(lambda draft: write(draft, state)))

        stream.read_while(what, work)

    def _config(self, optimizer: Any = True) -> dict[str, Any]:
        """Describes the wrapped model, with its compilation if there is an optimizer."""
        config: dict[str, Any] = keras.saving.serialize_keras_object(self._wrapped)
        config.pop("compile_config", None)
        if optimizer is not None and (compiled := self.get_compile_config()):
            config["compile_config"] = compiled
        return config

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: save the model and export it with stock Keras."""
        raise ConfigurationError(
            "A PipelineModel cannot be exported as it is. Export what `save` writes: "
            "in one process `keras.saving.load_model('model.keras').export(...)`."
        )
