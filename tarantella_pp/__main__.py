"""`python -m tarantella_pp` is the command `tarantella`."""

from __future__ import annotations

import sys

from tarantella_pp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
