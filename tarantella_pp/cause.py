"""What went wrong, in one line: the exception, the layer, the file and the line of the script."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST_CHARACTERS = 600
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parent))
_INSTALLED = ("site-packages", "dist-packages", "__autograph_generated")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\{\{function_node .*?\}\}")
# What Keras and TensorFlow write below the message itself.
_APPENDED = re.compile(r"\n\s*(Arguments received by |Traceback \(most recent call|\[\[\{\{node )")
_NOISE = re.compile(
    r"(Exception encountered when calling .*|Graph execution error:|Detected at node .*"
    r"|<stack traces unavailable>|File \".*|\d+ root error\(s\) found\.|\(\d+\) \w+:)$"
)
_NODE = re.compile(r"\[\[\{\{node \S+?/([^/}]+/[^/}]+(?<!PyFunc))\}\}")
_FILE = re.compile(r'File "([^"]+)", line (\d+)')


def describe(error: BaseException, *notes: str) -> str:
    """Returns an exception in one line."""
    text = f"{type(error).__name__}: {_first_line(str(error))}".removesuffix(": ")
    shown = ", ".join([*notes, *_notes(error)])
    return f"{text} ({shown})" if shown else text


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """Returns the last place of some that is in the user's own code, such as `"train.py:12"`."""
    lines = [f"{Path(file).name}:{line}" for file, line in frames if _is_users(file)]
    return lines[-1] if lines else ""


def calling_line() -> str:
    """Returns the innermost line of the user's own code that this thread is in, if any."""
    stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    return users_line(reversed(stack))


def _first_line(message: str) -> str:
    """Returns the first line that says something; one that ends with a colon takes the next."""
    message = message.rpartition("Exception encountered: ")[2]  # within a long one of Keras
    text = _APPENDED.split(_ESCAPES.sub("", message).strip(), maxsplit=1)[0]
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not _NOISE.match(line)]
    count = next((i for i, line in enumerate(said, 1) if not line.endswith(":")), len(said))
    found = " ".join(said[:count])
    return found if len(found) <= MOST_CHARACTERS else f"{found[: MOST_CHARACTERS - 3]}..."


def _notes(error: BaseException) -> Iterator[str]:
    """Yields what the message itself leaves out: layer, file, line of the user's code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    message = str(error)
    layer = _layer(frames)
    if layer and f"'{layer}'" not in message:
        yield f"layer '{layer}'"
    elif node := _NODE.search(message):
        yield f"node {node[1]}"
    lines = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    # TensorFlow puts the traceback of a function that it calls into its own message.
    lines += [(file, int(line)) for file, line in _FILE.findall(message)]
    if place := users_line(lines):
        yield place


def _layer(frames: list[types.FrameType]) -> str:
    """Returns the name of the innermost Keras layer that was being called."""
    keras = sys.modules.get("keras")
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        users = _is_users(frame.f_code.co_filename)
        if users and keras is not None and isinstance(owner, keras.Layer):
            return str(owner.name)
    return ""


def _is_users(file: str) -> bool:
    libraries = tuple(os.path.join(folder, "") for folder in _LIBRARIES)
    installed = any(name in file for name in _INSTALLED)
    return not installed and not file.startswith(libraries) and os.path.exists(file)
