"""What the library logs, as far as a rank shows it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

LEVEL_VARIABLE = "TNT_LOG_LEVEL"
ALL_VARIABLE = "TNT_LOG_ON_ALL_DEVICES"
_LIBRARY = "tarantella_pp"


def show(environ: Mapping[str, str], rank: int) -> None:
    """Shows what the library logs below the level of a warning, where the user asked for it.

    Warnings and errors are shown on all ranks as Python does, unless the script says otherwise.
    """
    level = environ.get(LEVEL_VARIABLE, "WARNING")
    logger = logging.getLogger(_LIBRARY)
    if level == "ERROR":
        logger.setLevel(level)
    elif level in ("DEBUG", "INFO") and (rank == 0 or environ.get(ALL_VARIABLE) == "1"):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
        # A script that sets up logging of its own shows it there.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
        logger.setLevel(level)
