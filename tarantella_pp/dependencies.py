"""Errors for missing packages name the command that installs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tarantella_pp.errors import MissingDependencyError

# How to install what the package can be used without.
INSTALL = {
    "tensorflow": "`pip install tensorflow-cpu`, or `pip install 'tensorflow[and-cuda]'` for GPUs",
    "keras": "`pip install keras`",
}


@contextlib.contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Runs imports; a package that is missing is an error that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in INSTALL:
            raise
        raise MissingDependencyError(
            f"{what} needs {package}, which is not installed here: {INSTALL[package]}."
        ) from error


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, without importing it."""
    from importlib import metadata  # loads more modules than all else of `import tarantella_pp`

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
