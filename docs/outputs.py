"""Runs the commands that the documents show, and writes down what they print.

    python docs/outputs.py                     # rewrites README.md and docs/*.md, in some minutes
    python docs/outputs.py --check README.md   # says where a document is out of date

A block of code whose first line is `$ tarantella ...` is run in an empty folder with a link to the
examples: all of its commands one after the other, of which the last one's output stands below. How
long a solver took differs each time, and counts as no difference.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?<=\n)```(?:text)?\n"
    r"(?P<commands>(?:\$ tarantella (?:.*\\\n)*.*\n)+)"
    r"(?P<output>(?:.*\n)*?)```\n"
)
SECONDS = re.compile(r"(?<=, )[\d.e-]+ s(?=\))")


def main() -> int:
    """Rewrites or checks documents; returns 1 if one that is checked is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("documents", nargs="*", type=Path)
    arguments = parser.parse_args()
    documents = arguments.documents or [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    old = False
    for document in documents:
        before = document.read_text(encoding="utf-8")
        after = BLOCK.sub(renewed, before)
        changes = difflib.unified_diff(
            before.splitlines(), after.splitlines(), str(document), "now"
        )
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in changes))
        old |= before != after
        if not arguments.check:
            document.write_text(after, encoding="utf-8")
    return int(old and arguments.check)


def renewed(block: re.Match[str]) -> str:
    """Returns a block with what its last command prints now."""
    shown = printed(block["commands"])
    if plain(shown) == plain(block["output"]):
        return block[0]
    start = block.start()
    return block[0][: block.start("output") - start] + shown + "```\n"


def printed(commands: str) -> str:
    """Runs commands in a folder of their own; returns what the last one prints."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "80"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for command in re.sub(r"\\\n", " ", commands).splitlines():
            run = command.replace("$ tarantella", f"{shlex.quote(sys.executable)} -m tarantella_pp")
            answer = subprocess.run(
                ["bash", "-o", "pipefail", "-c", run],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
    return "".join(f"{line.rstrip()}\n" for line in answer.stdout.strip().splitlines())


def plain(output: str) -> list[str]:
    """Returns the words of an output, without the seconds that its solver took."""
    return SECONDS.sub("", " ".join(output.split())).split()


if __name__ == "__main__":
    sys.exit(main())
