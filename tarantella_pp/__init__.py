"""Pipeline- and data-parallel training of Keras 3 models on TensorFlow over MPI.

    import tarantella_pp as tnt

    model = tnt.PipelineModel(keras_model, num_stages=4)    # stages x replicas on all ranks
    model = tnt.Model(keras_model)                          # data parallel alone

Names are loaded when they are first used: importing this package loads neither Keras nor
TensorFlow nor MPI, so that plans and schedules can be handled where there are none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarantella_pp import callbacks as callbacks
    from tarantella_pp import errors as errors
    from tarantella_pp import models as models
    from tarantella_pp.custom_steps.distributed_optimizer import (
        DistributedOptimizer as DistributedOptimizer,
    )
    from tarantella_pp.custom_steps.tensor_collectives import allreduce as allreduce
    from tarantella_pp.custom_steps.tensor_collectives import (
        broadcast_variables as broadcast_variables,
    )
    from tarantella_pp.models.data_parallel_model import Model as Model
    from tarantella_pp.models.data_parallel_model import Sequential as Sequential
    from tarantella_pp.models.deferred_init import deferred_init as deferred_init
    from tarantella_pp.models.make_plan import make_plan as make_plan
    from tarantella_pp.models.pipeline_model import PipelineModel as PipelineModel
    from tarantella_pp.models.profiler import profile as profile
    from tarantella_pp.models.ranks import barrier as barrier
    from tarantella_pp.models.ranks import get_master_rank as get_master_rank
    from tarantella_pp.models.ranks import get_rank as get_rank
    from tarantella_pp.models.ranks import get_size as get_size
    from tarantella_pp.models.ranks import init as init
    from tarantella_pp.models.ranks import is_master_rank as is_master_rank
    from tarantella_pp.partition.graph.profile import Profile as Profile
    from tarantella_pp.partition.plan.hardware_spec import HardwareSpec as HardwareSpec
    from tarantella_pp.partition.plan.hardware_spec import LayerSpeed as LayerSpeed
    from tarantella_pp.partition.plan.hardware_spec import PassSpeed as PassSpeed
    from tarantella_pp.partition.plan.hardware_spec import machines as machines
    from tarantella_pp.partition.plan.plan import Plan as Plan

    __version__: str

_HOME = {
    "DistributedOptimizer": "tarantella_pp.custom_steps.distributed_optimizer",
    "HardwareSpec": "tarantella_pp.partition.plan.hardware_spec",
    "LayerSpeed": "tarantella_pp.partition.plan.hardware_spec",
    "Model": "tarantella_pp.models.data_parallel_model",
    "PassSpeed": "tarantella_pp.partition.plan.hardware_spec",
    "PipelineModel": "tarantella_pp.models.pipeline_model",
    "Plan": "tarantella_pp.partition.plan.plan",
    "Profile": "tarantella_pp.partition.graph.profile",
    "Sequential": "tarantella_pp.models.data_parallel_model",
    "allreduce": "tarantella_pp.custom_steps.tensor_collectives",
    "barrier": "tarantella_pp.models.ranks",
    "broadcast_variables": "tarantella_pp.custom_steps.tensor_collectives",
    "deferred_init": "tarantella_pp.models.deferred_init",
    "get_master_rank": "tarantella_pp.models.ranks",
    "get_rank": "tarantella_pp.models.ranks",
    "get_size": "tarantella_pp.models.ranks",
    "init": "tarantella_pp.models.ranks",
    "is_master_rank": "tarantella_pp.models.ranks",
    "machines": "tarantella_pp.partition.plan.hardware_spec",
    "make_plan": "tarantella_pp.models.make_plan",
    "profile": "tarantella_pp.models.profiler",
}
"""Module of each public name."""
_MODULES = ("callbacks", "errors", "models")
"""Modules that are public names themselves."""

__all__ = [
    "DistributedOptimizer",
    "HardwareSpec",
    "LayerSpeed",
    "Model",
    "PassSpeed",
    "PipelineModel",
    "Plan",
    "Profile",
    "Sequential",
    "__version__",
    "allreduce",
    "barrier",
    "broadcast_variables",
    "callbacks",
    "deferred_init",
    "errors",
    "get_master_rank",
    "get_rank",
    "get_size",
    "init",
    "is_master_rank",
    "machines",
    "make_plan",
    "models",
    "profile",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    if name in _HOME or name in _MODULES:
        from tarantella_pp.dependencies import needed_for

        with needed_for(f"tarantella_pp.{name}"):
            module = importlib.import_module(_HOME.get(name, f"tarantella_pp.{name}"))
        value = module if name in _MODULES else getattr(module, name)
    elif name == "__version__":
        from importlib import metadata

        value = metadata.version("tarantella-pp")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return list(__all__)
