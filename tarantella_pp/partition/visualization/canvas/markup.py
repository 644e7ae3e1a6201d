"""Elements of HTML and SVG; the one place where text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

# What XML does not allow, and what turns around the direction of the text behind it.
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]|[\u202a-\u202e\u2066-\u2069]"
)
_VOID = frozenset({"br", "meta"})


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def escape(text: str) -> str:
    """Makes text safe inside of elements and attributes."""
    return html.escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Makes an element."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given} />")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Sequence[str]) -> Markup:
    """Puts pieces one behind the other; text that is no `Markup` is escaped."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in children))


def number(value: float) -> str:
    """Writes a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else number(value)
