"""Commands of a command: `tarantella plan make`, `tarantella checkpoint show`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from tarantella_pp.cli.io.output import USAGE_ERROR, Parser, guarded


class Subcommands:
    """The commands of a command, each in a module of its own."""

    def __init__(self, command: str, modules: str, helps: Mapping[str, str]) -> None:
        self._command = command
        self._modules = modules
        self._helps = helps

    def add_to(self, parser: argparse.ArgumentParser) -> list[Parser]:
        """Adds them with their options; returns their parsers."""
        chosen = parser.add_subparsers(
            dest=f"{self._command}_command", metavar="COMMAND", parser_class=Parser
        )
        parsers = []
        for name, text in self._helps.items():
            parsers.append(chosen.add_parser(name, help=text, description=f"{text.capitalize()}."))
            self._module(name).add_arguments(parsers[-1])
        return parsers

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the one that was chosen; returns its exit code."""
        name = getattr(arguments, f"{self._command}_command")
        if name is None:
            names = ", ".join(self._helps)
            sys.stderr.write(f"tarantella {self._command}: name one of {names}.\n")
            return USAGE_ERROR
        module = self._module(name)
        return guarded(f"tarantella {self._command}", lambda: int(module.run(arguments)))

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self._modules}{name}")
