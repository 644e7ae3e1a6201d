"""Gives memory that was freed back to the system, where large variables have passed through.

The launcher has the C library keep what tensors free, for the next step will take it again. What it
takes to make a first value, to write a file or to read one, is not taken again.
"""

from __future__ import annotations

import ctypes

_LARGE = 2**22


def give_back(freed: int = _LARGE) -> None:
    """Gives back what was freed, if it is worth the time; only glibc has it."""
    if freed >= _LARGE and (trim := getattr(_LIBRARY, "malloc_trim", None)) is not None:
        trim(0)


_LIBRARY = ctypes.CDLL(None)
