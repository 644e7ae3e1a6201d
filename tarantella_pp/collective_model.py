"""Weights and files of a model that is spread over ranks, as Keras' own methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from tarantella_pp.collective import collective, digest
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.saving import save_plain

if TYPE_CHECKING:
    from tarantella_pp.optimizer_state import OptimizerState
    from tarantella_pp.pipeline import Pipeline


class CollectiveModel(keras.Model):
    """A Keras model whose weights are on the ranks of a pipeline.

    Its methods gather the weights first, so all ranks must call them.
    """

    _pipeline: Pipeline
    _optimizer_state: OptimizerState | None = None

    @collective()
    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Returns all weights, on every rank; all ranks must call it."""
        self._pipeline.state.gather()
        weights: list[np.ndarray[Any, Any]] = super().get_weights()
        return weights

    @collective(weights=lambda given: digest(given["weights"]))
    def set_weights(self, weights: Any) -> None:
        """Sets all weights; all ranks must call it, with the same values.

        Args:
            weights: Arrays in the order of `get_weights`.

        Raises:
            ConfigurationError: If the values differ between ranks.
        """
        super().set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the wrapped model."""
        config: dict[str, Any] = self._pipeline.extracted.model.get_config()
        return config

    @collective("filepath", "overwrite", "include_optimizer")
    def save(
        self,
        filepath: str | Path,
        overwrite: bool = True,
        zipped: bool | None = None,
        include_optimizer: bool = True,
    ) -> None:
        """Saves the wrapped model as a plain `.keras` file, which stock Keras loads and trains on.

        All ranks must call it; the last one writes. The file replaces an older one only when it
        is complete.

        Args:
            filepath: Path that ends in `.keras`.
            overwrite: Whether to replace an existing file.
            zipped: Must not be `False`: the file is always a zip file.
            include_optimizer: Whether to save the optimizer and what was compiled.

        Raises:
            ConfigurationError: If the format is another, or the file must not be replaced.
        """
        pipeline = self._pipeline
        path = Path(filepath)
        if path.suffix != ".keras" or zipped is False:
            raise ConfigurationError(
                "A PipelineModel is saved as one file that ends in '.keras'. "
                f"Received: filepath='{filepath}', zipped={zipped}"
            )
        pipeline.refuse_existing(path, overwrite)
        pipeline.state.gather()
        state = self._optimizer_state if include_optimizer else None
        optimizer = None if state is None else state.whole()

        def write() -> None:
            config = None if state is None else self.get_compile_config()
            save_plain(pipeline.extracted, config, optimizer, path)

        pipeline.on_one_rank("save", write)

    @collective("filepath", "overwrite", "max_shard_size")
    def save_weights(
        self, filepath: str | Path, overwrite: bool = True, max_shard_size: float | None = None
    ) -> None:
        """Saves the weights as plain Keras does; all ranks must call it, the last one writes.

        Args:
            filepath: Path that ends in `.weights.h5`, or `.weights.json` for several files.
            overwrite: Whether to replace existing files.
            max_shard_size: Largest size of one file, in GB.

        Raises:
            ConfigurationError: If the file exists and may not be replaced.
        """
        pipeline = self._pipeline
        pipeline.refuse_existing(Path(filepath), overwrite)
        pipeline.state.gather()
        state = self._optimizer_state
        optimizer = None if state is None else state.whole()

        def write() -> None:
            plain = self._plain(optimizer)
            plain.save_weights(filepath, overwrite=True, max_shard_size=max_shard_size)

        pipeline.on_one_rank("save_weights", write)

    @collective("skip_mismatch")
    def load_weights(
        self, filepath: str | Path, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Loads weights as plain Keras does, each rank those of the optimizer that it needs.

        Args:
            filepath: Path of a file of weights that all ranks can read.
            skip_mismatch: Whether to skip weights that do not fit.
            **kwargs: As of `keras.Model.load_weights`.
        """
        state = self._optimizer_state
        optimizer = None if state is None else state.receiver()
        self._plain(optimizer).load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def _plain(self, optimizer: Any) -> keras.Model:
        """A stock Keras model of the same layers."""
        extracted = self._pipeline.extracted
        plain = keras.Model(extracted.inputs_struct, extracted.outputs_struct, name=self.name)
        if optimizer is not None:
            plain.compile(optimizer)
        return plain

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: save the model and export it with stock Keras.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "A PipelineModel cannot be exported as it is. Save it with `save('model.keras')`, and "
            "call `keras.saving.load_model('model.keras').export(...)` in one process."
        )
