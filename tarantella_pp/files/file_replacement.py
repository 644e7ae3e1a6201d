"""Files that are never half-written: written beside the old ones, then put in their place."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import h5py

from tarantella_pp.errors import FileError
from tarantella_pp.files.checkpoint_folder import sync
from tarantella_pp.runtime.comm.collective import files_of_index


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file that replaces an older one when it is complete and on the disk."""
    path = Path(os.path.realpath(path))
    with _folder_beside(path) as folder:
        write(folder / path.name)
        _move(folder / path.name, path)


def replace_shards(path: Path, write: Callable[[Path], None]) -> None:
    """As `replace_file` for an index and the files of weights that it names, as Keras makes them.

    New files never have the names of those that the old index needs: it stays valid until the new
    one, which comes last, is in its place. Then the files that only the old one needs go; the first
    becomes an empty one, for Keras opens it in any case.
    """
    path = Path(os.path.realpath(path))
    if path.suffix != ".json":
        warnings.warn(f"The index of '{path}' is '{path.with_suffix('.json')}'.", stacklevel=2)
        path = path.with_suffix(".json")
    old = _shards(path)
    with _folder_beside(path) as folder:
        index = folder / f"{_free_name(path)}.weights.json"
        write(index)
        new = _shards(index)
        try:
            for name in new:
                _move(folder / name, path.with_name(name))
            _move(index, path)
        except BaseException:
            _remove(path, new)
            raise
        if (first := _first_shard(path)).name not in new:  # Keras opens it before it looks
            h5py.File(folder / first.name, "w").close()
            _move(folder / first.name, first)
    _remove(path, old - new - {first.name})


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A folder on the same disk that goes in any case; errors of the disk name the file."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        yield folder
    except OSError as error:
        raise FileError(
            f"Cannot write '{path}': {error}. What was there before is unchanged."
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Puts a file in its place, after all of it is on the disk; and then its name, too."""
    sync(source)
    os.replace(source, target)
    sync(target.parent)


def _shards(index: Path) -> set[str]:
    """The files beside an index that it names."""
    return {Path(name).name for name in files_of_index(index)}


def _first_shard(index: Path) -> Path:
    """The file that Keras expects beside an index, whatever it names."""
    return index.with_name(f"{_base(index)}_00000.weights.h5")


def _base(index: Path) -> str:
    return index.stem.removesuffix(".weights")


def _free_name(index: Path) -> str:
    """What the names of new files begin with, so that they are none of the old ones."""
    base = _base(index)
    names = (base if number == 0 else f"{base}-{number}" for number in count())
    return next(name for name in names if not list(index.parent.glob(f"{name}_[0-9]*.weights.h5")))


def _remove(index: Path, names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            index.with_name(name).unlink()
