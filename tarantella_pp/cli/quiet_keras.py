"""Keras on the command line: no accelerator, no chatter, and exceptions told in one line."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tarantella_pp.cli.output import one_line
from tarantella_pp.errors import ConfigurationError, UnsupportedModelError

_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
"""Planning computes nothing: it must not take an accelerator from a job, and the variable of
oneDNN saves a line on stderr."""


@contextlib.contextmanager
def quiet_keras(what: str) -> Iterator[Any]:
    """Yields Keras while code of others runs: stdout stays ours, and what it raises is told.

    Args:
        what: What runs, for the message.

    Raises:
        UnsupportedModelError: The code raised, or ended the program.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            import keras

            yield keras
        except (ConfigurationError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise UnsupportedModelError(
                f"{what} raised {type(error).__name__}: {one_line(error, 500)}{_place(error)}"
            ) from error


def _place(error: BaseException) -> str:
    """Returns the line of the user's code that raised, where it is known."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith("<")
        and Path(frame.filename) != Path(__file__)
        and f"{os.sep}importlib{os.sep}" not in frame.filename
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
