"""`tarantella checkpoint convert`: a file of plain Keras from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.checkpoint import checkpoint_paths
from tarantella_pp.cli.io import model_source
from tarantella_pp.cli.io.output import check_target, write_table
from tarantella_pp.cli.io.quiet_keras import quiet_keras
from tarantella_pp.errors import ConfigurationError, FileError

if TYPE_CHECKING:
    from tarantella_pp.checkpoints.manifest import Manifest

_ENDINGS = (".keras", ".weights.h5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella checkpoint convert`."""
    parser.add_argument("source", metavar="SOURCE", help=checkpoint_paths.HELP)
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a .keras or .weights.h5 file",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="what makes the model, where SOURCE cannot: " + model_source.FORMS,
    )
    parser.epilog = "Of a directory the newest checkpoint that is whole is taken."


def run(arguments: argparse.Namespace) -> int:
    """Makes the model of a checkpoint in this process, and saves it as plain Keras does."""
    if not arguments.output.endswith(_ENDINGS):
        raise ConfigurationError(
            f"Expected a file that ends in {' or '.join(_ENDINGS)}. Received: {arguments.output!r}"
        )
    check_target(arguments.output)
    folder, manifest = _newest_whole(checkpoint_paths.found_in(arguments.source))
    model = _restored(folder, manifest, arguments.model)
    if arguments.output.endswith(".keras"):
        model.save(arguments.output)
    else:
        model.save_weights(arguments.output)
    write_table(f"Wrote {arguments.output} from {folder}: {manifest.where()}.")
    return 0


def _newest_whole(folders: list[Path]) -> tuple[Path, Manifest]:
    from tarantella_pp.checkpoints.manifest import read_manifest
    from tarantella_pp.checkpoints.verification import damage

    problems = []
    for folder in folders:
        problem = damage(folder)
        if not problem:
            return folder, read_manifest(folder)
        problems.append(problem)
    raise FileError(f"No checkpoint is whole: {'; '.join(problems)}")


def _restored(folder: Path, manifest: Manifest, source: str | None) -> Any:
    """The model of a checkpoint, with its weights and the state of its optimizer."""
    if source is None and manifest.config is None:
        raise ConfigurationError(
            f"Checkpoint '{folder}' does not describe its model, for a layer of it has no "
            "configuration. Pass what makes the model: --model FILE.py:FUNCTION"
        )
    with quiet_keras(f"the model of '{folder}'") as keras:
        if source is not None:
            plain = model_source.build_model(source)
        else:
            plain = keras.saving.deserialize_keras_object(manifest.config)

        from tarantella_pp.checkpoints.checkpoint_reader import RestoredState
        from tarantella_pp.models.pipeline_model import PipelineModel

        model = PipelineModel(plain, num_stages=1, num_micro_batches=1)
        if manifest.compiled is not None:
            model.compile(**keras.saving.deserialize_keras_object(manifest.compiled))
        elif manifest.optimizer is not None:
            model.compile(keras.saving.deserialize_keras_object(manifest.optimizer))
        RestoredState(folder, manifest).restore(model, model._state_share())
    return model
