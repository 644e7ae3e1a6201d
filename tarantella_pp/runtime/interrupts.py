"""Ctrl-C between steps instead of in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Lets Ctrl-C wait until what is inside has ended, as it does for a step of plain Keras.

    A second one does not wait.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed: list[types.FrameType | None] = []

    def note(number: int, frame: types.FrameType | None) -> None:
        pressed.append(frame)
        if len(pressed) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(signal.SIGINT, pressed[0])
