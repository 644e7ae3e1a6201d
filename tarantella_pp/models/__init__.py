"""The public face: `PipelineModel`, its files, its checks, `make_plan`, `get_rank`.

As `tnt.models`, it has the functions of `keras.models`, which make distributed models here:

    model = tnt.models.load_model("model.keras", num_stages=4)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarantella_pp.models.model_building import clone_model as clone_model
    from tarantella_pp.models.model_building import load_model as load_model
    from tarantella_pp.models.model_building import model_from_config as model_from_config
    from tarantella_pp.models.model_building import model_from_json as model_from_json
    from tarantella_pp.models.model_building import save_model as save_model

__all__ = ["clone_model", "load_model", "model_from_config", "model_from_json", "save_model"]


def __getattr__(name: str) -> Any:
    """Loads the public functions when one is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tarantella_pp.dependencies import needed_for

    with needed_for(f"tarantella_pp.models.{name}"):
        return getattr(importlib.import_module(f"{__name__}.model_building"), name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return list(__all__)
