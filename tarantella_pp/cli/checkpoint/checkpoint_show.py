"""`tarantella checkpoint show`: what checkpoints there are, and what is in the newest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarantella_pp.cli.checkpoint import checkpoint_paths
from tarantella_pp.cli.io.output import FAILURE, write_json, write_table

if TYPE_CHECKING:
    from tarantella_pp.checkpoints.manifest import Manifest, SavedFile

_KINDS = {
    "model": "weights",
    "optimizer": "optimizer",
    "metric": "metrics",
    "data": "order",
    "best": "best",
}
"""What the keys of tensors begin with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tarantella checkpoint show`."""
    parser.add_argument("directory", metavar="DIRECTORY", help=checkpoint_paths.HELP)
    parser.add_argument("--tensors", action="store_true", help="list every tensor, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Prints a table of all checkpoints, and those of the newest that can be read."""
    from tarantella_pp.checkpoints.manifest import read_manifest
    from tarantella_pp.errors import FileError

    read: dict[Path, Manifest | str] = {}
    for path in checkpoint_paths.found_in(arguments.directory):
        try:
            read[path] = read_manifest(path)
        except FileError as error:
            read[path] = str(error)
    whole = [manifest for manifest in read.values() if not isinstance(manifest, str)]
    if arguments.json:
        write_json({path.name: _as_json(manifest) for path, manifest in read.items()})
    else:
        write_table(_list(read))
        for manifest in whole[:1]:
            write_table(*_details(manifest))
        for manifest in whole[:1] if arguments.tensors else ():
            write_table(_tensors(manifest))
    return 0 if whole else FAILURE


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        left = name in _LEFT
        whole = left and name != "Tensor"
        table.add_column(name, justify="left" if left else "right", no_wrap=whole, overflow="fold")
    return table


_LEFT = ("Checkpoint", "Written", "File", "Tensor", "Key", "Shape", "Kind")


def _list(read: dict[Path, Manifest | str]) -> Any:
    """The table of all checkpoints."""
    from tarantella_pp.partition.graph.units import format_bytes

    table = _table("Checkpoint", "Step", "Epochs", "+ steps", "Size", "Written")
    for path, manifest in read.items():
        if isinstance(manifest, str):
            table.add_row(path.name, "", "", "", "", manifest)
            continue
        size = format_bytes(sum(file.size for file in manifest.files), short=True)
        figures = (str(manifest.step), str(manifest.epoch), str(manifest.epoch_step))
        table.add_row(path.name, *figures, size, manifest.written)
    return table


def _details(manifest: Manifest) -> Iterator[Any]:
    """What is in a checkpoint."""
    from tarantella_pp.partition.graph.units import format_bytes

    files = _table(
        "File", "Rank", "Stages", *(text.capitalize() for text in _used(manifest)), "Size"
    )
    for number, file in enumerate(manifest.files):
        sizes = [_bytes(manifest, kind, number) for kind in _used(manifest).values()]
        stages = ", ".join(map(str, file.stages))
        row = [format_bytes(size, short=True) if size else "-" for size in (*sizes, file.size)]
        files.add_row(_short(file), str(file.rank), stages, *row)
    yield files
    yield f"Trained: {manifest.where()}, {manifest.step} steps."
    if manifest.learning_rate is not None:
        yield f"Learning rate: {manifest.learning_rate:g}."
    logs = ", ".join(f"{name} {value}" for name, value in manifest.logs.items())
    yield f"Last step: {logs}."
    last = {name: values[-1] for name, values in manifest.history.items() if values}
    if last:
        yield f"Last epoch: {', '.join(f'{name} {value}' for name, value in last.items())}."
    data = manifest.facts.get("data", {})
    yield f"Data: {data.get('contents')}; {manifest.position.batches} batches of this pass read."
    yield f"Optimizer: {manifest.facts.get('optimizer', {}).get('class_name')}."
    yield f"Written with {', '.join(f'{name} {v}' for name, v in manifest.versions.items())}."


def _used(manifest: Manifest) -> dict[str, str]:
    """The kinds of tensors that there are, by what they are called."""
    begins = {key.partition("/")[0] for key in manifest.tensors}
    return {text: kind for kind, text in _KINDS.items() if kind in begins}


def _bytes(manifest: Manifest, kind: str, file: int) -> int:
    from tarantella_pp.partition.graph.units import item_bytes

    return sum(
        tensor.size * item_bytes(tensor.dtype)
        for key, tensor in manifest.tensors.items()
        if tensor.file == file and key.startswith(f"{kind}/")
    )


def _tensors(manifest: Manifest) -> Any:
    table = _table("Key", "Tensor", "Kind", "Shape", "File")
    for key, tensor in sorted(manifest.tensors.items(), key=lambda item: _order(item[0])):
        shape = str(list(tensor.shape))
        table.add_row(key, tensor.label, tensor.dtype, shape, _short(manifest.files[tensor.file]))
    return table


def _short(file: SavedFile) -> str:
    return file.name.removesuffix(".safetensors")


def _order(key: str) -> tuple[str, str]:
    kind, _, number = key.partition("/")
    return kind, number.zfill(12)


def _as_json(manifest: Manifest | str) -> Any:
    """A manifest without what only training needs."""
    if isinstance(manifest, str):
        return {"damaged": manifest}
    import msgspec

    told = msgspec.to_builtins(manifest)
    left_out = ("facts", "config", "plan", "compiled", "optimizer")
    return {name: value for name, value in told.items() if name not in left_out}
