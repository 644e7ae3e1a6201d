"""Where a thread is: the blocking MPI call it sits in, read off its Python frame."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import textwrap
import types


def blocking_call(thread_id: int) -> str:
    """Returns the place of the MPI call a thread is in, such as `"train.py:12 comm.Recv"`.

    mpi4py's functions are compiled and have no frame of their own. So this looks at the
    instruction the innermost Python frame has stopped at: a call, whose expression the source
    text gives, on an object that the frame's variables give. The empty string means that the
    thread does something else, or that nothing certain can be said.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None or "mpi4py" not in sys.modules:
        return ""
    call = _current_call(frame)
    if call is None or not _is_mpi(call.func, frame):
        return ""
    file = os.path.basename(frame.f_code.co_filename)
    return f"{file}:{frame.f_lineno} {ast.unparse(call.func)}"


def position(thread_id: int) -> tuple[int, int]:
    """Returns something that changes when the thread moves on: its frame and instruction."""
    frame = sys._current_frames().get(thread_id)
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)


def _current_call(frame: types.FrameType) -> ast.Call | None:
    """Returns the call expression that the frame is executing, or None if it is in no call."""
    positions = list(frame.f_code.co_positions())
    first, last, start, stop = positions[frame.f_lasti // 2]
    if first is None or last is None or start is None or stop is None:
        return None
    lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)]
    # The columns are in bytes; the last line is cut first, as it may be the first line, too.
    lines[-1] = lines[-1].encode()[:stop].decode(errors="replace")
    lines[0] = lines[0].encode()[start:].decode(errors="replace")
    try:
        expression = ast.parse(textwrap.dedent("".join(lines)), mode="eval").body
    except SyntaxError:
        return None
    return expression if isinstance(expression, ast.Call) else None


def _evaluate(expression: ast.expr, frame: types.FrameType) -> object:
    """Returns the object a chain of names stands for, without running any code of the user."""
    if isinstance(expression, ast.Name):
        for scope in (frame.f_locals, frame.f_globals):
            if expression.id in scope:
                return scope[expression.id]
    if isinstance(expression, ast.Attribute):
        owner = _evaluate(expression.value, frame)
        found = inspect.getattr_static(owner, expression.attr, None)
        if isinstance(found, types.MemberDescriptorType):  # an attribute kept in __slots__
            return found.__get__(owner)
        return getattr(found, "__func__", found)  # class and static methods are wrapped
    return None


def _is_mpi(expression: ast.expr, frame: types.FrameType) -> bool:
    """Whether what is called is a function or method of mpi4py, or a method of its result."""
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Call):
        return _is_mpi(expression.value.func, frame)
    function = _evaluate(expression, frame)
    owner = getattr(function, "__objclass__", None)
    module = getattr(owner, "__module__", None) or getattr(function, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] == "mpi4py"
