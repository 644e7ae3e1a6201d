"""What tests of files share: a disk that is full, what a folder has, what a rank holds."""

import contextlib
import functools
import resource
import signal
from pathlib import Path

import numpy as np

from tarantella_pp.errors import ConfigurationError


@contextlib.contextmanager
def full_disk(size=100_000):
    """No file may grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def contents(folder: Path):
    """Returns the bytes of all files in a folder and below, by their paths in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def held_bytes(model):
    """Returns the memory of a model's variables on this rank."""
    found = [v._value.read_value() for v in model.variables if v._value is not None]
    return sum(int(np.prod(t.shape)) * t.dtype.size for t in found)


def error_of(call, kinds=Exception):
    """Returns kind and text of the error that a call ends with; nothing without one."""
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""


refused = functools.partial(error_of, kinds=ConfigurationError)
"""The same where nothing but a refusal may end the call."""
