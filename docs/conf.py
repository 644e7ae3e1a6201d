"""Sphinx configuration: `sphinx-build -W docs docs/_build` makes the pages."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

_project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
project = "tarantella_pp"
author = copyright = _project["authors"][0]["name"]
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# The pages are built without TensorFlow and MPI.
autodoc_mock_imports = ["keras", "mpi4py", "tensorflow"]
autodoc_member_order = "bysource"
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"tarantella_pp {release}"
