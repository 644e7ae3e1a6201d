"""`tarantella checkpoint convert`: a file of plain Keras from a checkpoint, and the other way."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.checkpoint import checkpoint_paths
from tarantella_pp.cli.io import model_source
from tarantella_pp.cli.io.output import check_target, existing_file, write_table
from tarantella_pp.cli.io.quiet_keras import quiet_keras
from tarantella_pp.errors import ConfigurationError, FileError

if TYPE_CHECKING:
    from tarantella_pp.checkpoints.manifest import Manifest

_ENDINGS = (".keras", ".weights.h5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella checkpoint convert`."""
    parser.add_argument(
        "source", metavar="SOURCE", help=f"{checkpoint_paths.HELP}; or a .keras or .weights.h5 file"
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a .keras or .weights.h5 file; of a file, the directory of a run that begins with it",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="what makes the model, where SOURCE cannot: " + model_source.FORMS,
    )
    parser.add_argument(
        "--epoch",
        type=int,
        metavar="N",
        help="how many epochs the model of a file has been trained (default: 0)",
    )
    parser.epilog = (
        "Of a directory the newest checkpoint that is whole is taken. In the directory that is "
        "made of a file, fit(..., callbacks=[tnt.callbacks.Checkpoint(OUTPUT)]) goes on with the "
        "weights and, where the file has it, the state of the optimizer."
    )


def run(arguments: argparse.Namespace) -> int:
    """Makes the model of a checkpoint or of a file in this process, and saves it as the other."""
    if arguments.source.endswith(_ENDINGS) and not Path(arguments.source).is_dir():
        return _to_checkpoint(arguments)
    if not arguments.output.endswith(_ENDINGS):
        raise ConfigurationError(
            f"Expected a file that ends in {' or '.join(_ENDINGS)}. Received: {arguments.output!r}"
        )
    if arguments.epoch is not None:
        raise ConfigurationError(
            "A checkpoint knows its epochs: leave --epoch out. Received: "
            f"--epoch {arguments.epoch}, SOURCE={arguments.source!r}"
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


def _to_checkpoint(arguments: argparse.Namespace) -> int:
    """Makes the checkpoint that a run begins with of a file."""
    from tarantella_pp.checkpoints.checkpoint_folder import checkpoints_in

    source, directory, epoch = arguments.source, Path(arguments.output), arguments.epoch or 0
    if epoch < 0:
        raise ConfigurationError(f"Expected a number of epochs. Received: --epoch {epoch}")
    if arguments.output.endswith(_ENDINGS) or directory.is_file():
        raise ConfigurationError(
            f"Expected the directory of a run. Received: OUTPUT={arguments.output!r}"
        )
    if checkpoints_in(directory):
        raise ConfigurationError(
            f"'{directory}' has checkpoints of a run. Give what begins with '{source}' a directory "
            "of its own."
        )
    existing_file(source)
    model, has_optimizer = _of_file(source, arguments.model)

    from tarantella_pp.callbacks.resuming.first_checkpoint import write_first

    folder = write_first(model, directory, epoch, has_optimizer)
    state = "weights and optimizer state" if has_optimizer else "weights, no optimizer state"
    write_table(f"Wrote {folder} from {source}: {state}, {epoch} epochs.")
    return 0


def _of_file(source: str, maker: str | None) -> tuple[Any, bool]:
    """The model of a file of plain Keras, and whether it goes on with its optimizer's state."""
    if maker is None and not source.endswith(".keras"):
        raise ConfigurationError(
            f"'{source}' has weights only. Pass what makes the model: --model FILE.py:FUNCTION"
        )
    with quiet_keras(f"the model of '{source}'"):
        from tarantella_pp.models.files.state_reading import has_optimizer
        from tarantella_pp.models.model_loading import load_model
        from tarantella_pp.models.pipeline_model import PipelineModel

        if maker is None:
            model = load_model(source, num_stages=1, num_micro_batches=1)
        else:
            plain = model_source.build_model(maker)
            model = PipelineModel(plain, num_stages=1, num_micro_batches=1)
        if not isinstance(model, PipelineModel):
            raise ConfigurationError(
                f"The model of '{source}' has steps of its own, of which there are no checkpoints. "
                "Load it in the script, `tnt.models.load_model(file)`, before `fit`."
            )
        has_state = has_optimizer(Path(source)) and getattr(model, "optimizer", None) is not None
        if maker is not None:
            if has_state and model._optimizer_state is not None:
                model._optimizer_state.build()  # otherwise it would begin anew, as in plain Keras
            model.load_weights(source)
    return model, has_state


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

        from tarantella_pp.callbacks.resuming.checkpoint_restore import RestoredState
        from tarantella_pp.models.pipeline_model import PipelineModel

        model = PipelineModel(plain, num_stages=1, num_micro_batches=1)
        if manifest.compiled is not None:
            model.compile(**keras.saving.deserialize_keras_object(manifest.compiled))
        elif manifest.optimizer is not None:
            model.compile(keras.saving.deserialize_keras_object(manifest.optimizer))
        RestoredState(folder, manifest).restore(model, model._state_share())
    return model
