"""The public face: `PipelineModel`, its files, its checks, `make_plan`.

As `tnt.models`, it has the functions of `keras.models`, which make distributed models here:

    model = tnt.models.load_model("model.keras", num_stages=4)
"""

from __future__ import annotations

from tarantella_pp.errors import needed_for

with needed_for("tarantella_pp.models"):
    from tarantella_pp.models.model_building import (
        clone_model,
        load_model,
        model_from_config,
        model_from_json,
        save_model,
    )

__all__ = ["clone_model", "load_model", "model_from_config", "model_from_json", "save_model"]
