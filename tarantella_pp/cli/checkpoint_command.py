"""`tarantella checkpoint`: shows, verifies and converts the checkpoints of a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli import inputs
from tarantella_pp.cli.inputs import quiet_keras
from tarantella_pp.cli.output import FAILURE, add_subcommands, check_target, table, write_table
from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.partition.graph.units import format_bytes

if TYPE_CHECKING:
    from tarantella_pp.callbacks.checkpoint_folder import Manifest

HELP = "the directory that a Checkpoint callback was given, or one checkpoint in it"
_ENDINGS = (".keras", ".weights.h5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `tarantella checkpoint` and their options."""
    show, verify, convert = add_subcommands(
        parser,
        show=(_show, "list checkpoints, and print the contents of one"),
        verify=(_verify, "compare the files of checkpoints with their checksums"),
        convert=(_convert, "write a file of plain Keras from a checkpoint"),
    )
    for subcommand in (show, verify):
        subcommand.add_argument("directory", metavar="DIRECTORY", help=HELP)
    convert.add_argument("source", metavar="SOURCE", help=HELP)
    convert.add_argument("output", metavar="OUTPUT", help="a .keras or .weights.h5 file")
    model_help = f"what makes the model, where SOURCE cannot: {inputs.FORMS}"
    convert.add_argument("--model", metavar="MODEL", help=model_help)
    convert.epilog = "Of a directory the newest checkpoint that is whole is taken."
    parser.epilog = "exit codes: 0 done; 1 failed, or a checkpoint is damaged; 2 usage."


def _found_in(directory: str) -> list[Path]:
    """The checkpoints that a DIRECTORY names, the newest first."""
    from tarantella_pp.callbacks.checkpoint_folder import MANIFEST, checkpoints_in

    path = Path(directory)
    siblings = checkpoints_in(path.parent)  # a damaged one has no manifest to be known by
    if (path / MANIFEST).is_file() or path in siblings:
        return [path]
    if not (found := checkpoints_in(path)):
        what = "has no checkpoints" if path.is_dir() else "is no directory"
        raise ConfigurationError(f"{directory!r} {what}.")
    return found


def _show(arguments: argparse.Namespace) -> int:
    from tarantella_pp.callbacks.checkpoint_folder import read_manifest

    read: dict[Path, Manifest | str] = {}
    for path in _found_in(arguments.directory):
        try:
            read[path] = read_manifest(path)
        except FileError as error:
            read[path] = str(error)
    whole = [manifest for manifest in read.values() if not isinstance(manifest, str)]
    write_table(_list(read), *(part for manifest in whole[:1] for part in _details(manifest)))
    return 0 if whole else FAILURE


def _list(read: dict[Path, Manifest | str]) -> Any:
    rows: list[tuple[Any, ...]] = []
    for path, manifest in read.items():
        if isinstance(manifest, str):
            rows.append((path.name, "", "", "", "", manifest))
            continue
        size = format_bytes(sum(file.size for file in manifest.files), short=True)
        figures = (manifest.step, manifest.epoch, manifest.epoch_step)
        rows.append((path.name, *figures, size, manifest.written))
    heads = ("Checkpoint", "Step", "Epochs", "+ steps", "Size", "Written")
    return table(heads, rows, left=("Checkpoint", "Written"), folded=("Written",))


def _details(manifest: Manifest) -> Iterator[Any]:
    rows = [
        (one.name, one.rank, ", ".join(map(str, one.stages)), format_bytes(one.size, short=True))
        for one in manifest.files
    ]
    yield table(("File", "Rank", "Stages", "Size"), rows, left=("File",))
    yield f"Trained: {manifest.where()}, {manifest.step} steps."
    logs = ", ".join(f"{name} {value}" for name, value in manifest.logs.items())
    last = "step" if manifest.epoch_step else "epoch"
    yield f"Last {last}: {logs}. What else is known of it stands in its manifest.json."


def _verify(arguments: argparse.Namespace) -> int:
    from tarantella_pp.callbacks.checkpoint_folder import damages

    found = {path.name: list(damages(path)) for path in _found_in(arguments.directory)}
    for name, problems in found.items():
        write_table(*([f"{name}: damaged: {text}" for text in problems] or [f"{name}: whole"]))
    return FAILURE if any(found.values()) else 0


def _convert(arguments: argparse.Namespace) -> int:
    if not arguments.output.endswith(_ENDINGS):
        raise ConfigurationError(
            f"Expected a file that ends in {' or '.join(_ENDINGS)}. Received: {arguments.output!r}"
        )
    check_target("OUTPUT", arguments.output)
    folder, manifest = _newest_whole(_found_in(arguments.source))
    model = _restored(folder, manifest, arguments.model)
    save = model.save if arguments.output.endswith(".keras") else model.save_weights
    save(arguments.output)
    write_table(f"Wrote {arguments.output} from {folder}: {manifest.where()}.")
    return 0


def _newest_whole(folders: list[Path]) -> tuple[Path, Manifest]:
    from tarantella_pp.callbacks.checkpoint_folder import damages, read_manifest

    for folder in folders:
        if not any(damages(folder)):
            return folder, read_manifest(folder)
    raise FileError(
        f"No checkpoint is whole: {next(damages(folders[0]))}. `tarantella checkpoint verify` "
        "names what is damaged."
    )


def _restored(folder: Path, manifest: Manifest, source: str | None) -> Any:
    if manifest.plan is None:
        raise ConfigurationError(
            f"Checkpoint '{folder}' is one of a model with steps of its own, which is not "
            "converted. Run its script with the same `epochs`: `fit` trains nothing then, and "
            "model.save writes the file."
        )
    if source is None and manifest.config is None:
        raise ConfigurationError(
            f"Checkpoint '{folder}' does not describe its model, for a layer of it has no "
            "configuration. Pass what makes the model: --model FILE.py:FUNCTION"
        )
    with quiet_keras(f"the model of '{folder}'") as keras:
        keras.config.set_floatx(manifest.facts.get("floatx", "float32"))
        make = keras.saving.deserialize_keras_object
        plain = inputs.build_model(source) if source else make(manifest.config)

        from tarantella_pp.callbacks.checkpoint_reader import RestoredState
        from tarantella_pp.models.pipeline_model import PipelineModel

        # One stage: states are kept by the model's variables, whatever ranks have written them.
        model = PipelineModel(plain, num_stages=1, num_micro_batches=1)
        if manifest.compiled is not None:
            model.compile(**make(manifest.compiled))
        elif manifest.optimizer is not None:
            model.compile(make(manifest.optimizer))
        RestoredState(folder, manifest).restore(model, model._state_share())
    return model
