"""`python -m tarantella_pp` is the command `tarantella`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("tarantella_pp.cli.main", run_name="__main__")
