"""What the subcommands write: JSON or tables to stdout, one line for an error to stderr."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tarantella_pp.errors import ConfigurationError

FAILURE, USAGE_ERROR = 1, 2


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with the message."""
        if self.prog == "tarantella" and "unrecognized" in message:
            message += ": options of the script stand behind it"
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_subcommands(
    parser: argparse.ArgumentParser, **commands: tuple[Callable[[argparse.Namespace], int], str]
) -> list[Parser]:
    """Adds commands, each with what it runs and its help; returns their parsers."""
    chosen = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    parsers = []
    for name, (run, text) in commands.items():
        made = chosen.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        made.set_defaults(run=run)
        parsers.append(made)
    return parsers


def one_line(error: BaseException, limit: int = 1000) -> str:
    """Returns the message of an exception without line breaks and control characters."""
    text = _plain(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _plain(text: str) -> str:
    """Spells out control characters, which a name in a file may have to fool a terminal."""
    safe = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return text if text.isprintable() else "".join(safe)


def write_table(*parts: Any) -> None:
    """Writes tables and lines to stdout: as wide as the terminal, plain and whole in a pipe."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = console.width or 80  # COLUMNS=0 would show nothing
    for part in parts:
        whole = not console.is_terminal and isinstance(part, str | Text)
        wrap = console.options.update(no_wrap=whole, overflow="ignore" if whole else None)
        drawn = console.render(Text(part) if isinstance(part, str) else part, wrap)
        safe = Segments(Segment(_plain(text), style) for text, style, _ in drawn)
        console.print(safe, soft_wrap=whole, end="")


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Sequence[str] = (),
    folded: Sequence[str] = (), ruled: bool = True,
) -> Any:  # fmt: skip
    """Makes a table for `write_table`: figures to the right, columns of names whole or folded."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD if ruled else None, pad_edge=False, collapse_padding=not ruled)
    for name in heads:
        justify: Any = "left" if name in left else "right"
        whole = name in left and name not in folded
        made.add_column(name, justify=justify, no_wrap=whole, overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def existing_file(path: str) -> Path:
    """Returns the path of a file, or of a pipe, that is there."""
    if not Path(path).exists() or Path(path).is_dir():
        raise ConfigurationError(f"There is no file {path!r}.")
    return Path(path)


def check_target(option: str, path: str | None, *others: str | None) -> None:
    """Checks, before the work is done, that a file has a place, which is no other file's."""
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        wrong = "the name of a file in a folder that exists"
    elif path is not None and Path(path).resolve() in [Path(o).resolve() for o in others if o]:
        wrong = "a file that the command does not read or write already"
    else:
        return
    raise ConfigurationError(f"Expected {wrong}. Received: {option}={path}")
