"""The public face: `PipelineModel`, its files, its checks, `make_plan`, `get_rank`.

As `tnt.models`, it has the functions of `keras.models`, which make distributed models here:

    model = tnt.models.load_model("model.keras", num_stages=4)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarantella_pp.models.model_building import clone_model as clone_model
    from tarantella_pp.models.model_building import model_from_config as model_from_config
    from tarantella_pp.models.model_building import model_from_json as model_from_json
    from tarantella_pp.models.model_loading import load_model as load_model
    from tarantella_pp.models.model_loading import save_model as save_model

_HOME = {
    "clone_model": "model_building",
    "load_model": "model_loading",
    "model_from_config": "model_building",
    "model_from_json": "model_building",
    "save_model": "model_loading",
}
"""File of each public function."""

__all__ = ["clone_model", "load_model", "model_from_config", "model_from_json", "save_model"]


def __getattr__(name: str) -> Any:
    """Loads a public function when it is first used (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tarantella_pp.dependencies import needed_for

    with needed_for(f"tarantella_pp.models.{name}"):
        found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return list(__all__)
