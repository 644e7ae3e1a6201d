"""Sphinx configuration: `sphinx-build -W docs docs/_build` makes the pages."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.util import inspect

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

_project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
project = "tarantella_pp"
author = copyright = _project["authors"][0]["name"]
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# The pages are built without TensorFlow and MPI.
autodoc_mock_imports = ["keras", "mpi4py", "tensorflow"]
autodoc_member_order = "bysource"
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"tarantella_pp {release}"
html_css_files = ["style.css"]
html_static_path = ["style.css"]
html_use_index = html_domain_indices = False  # one searches


def setup(app: Any) -> None:
    """Has classes shown with their own arguments."""
    app.connect("autodoc-process-signature", _own_arguments)


def _own_arguments(app: Any, what: str, name: str, thing: Any, *rest: Any) -> Any:
    # Classes of the Keras that is not there take any arguments, and so would those made from them.
    if what == "class" and rest[1].startswith("(*args: Any"):
        own = inspect.signature(thing.__init__, bound_method=True)
        return inspect.stringify_signature(
            own, show_return_annotation=False, unqualified_typehints=True
        ), None
    return None
