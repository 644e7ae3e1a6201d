"""Keras on the command line: no accelerator, no chatter, and exceptions told in one line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from tarantella_pp.dependencies import needed_for
from tarantella_pp.errors import (
    ConfigurationError,
    MissingDependencyError,
    UnsupportedModelError,
)
from tarantella_pp.launch.cause import describe

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
    """Yields Keras while code of others runs, and tells what that raises.

    Its output does not mix with ours, nor do our options look like its own.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    arguments, sys.argv = sys.argv, sys.argv[:1]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with needed_for(what):
                import keras

                yield keras
        except (ConfigurationError, MissingDependencyError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise UnsupportedModelError(f"{what} raised {describe(error)}") from error
        finally:
            sys.argv = arguments
