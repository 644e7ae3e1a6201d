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
    from tarantella_pp.partition.graph.profile import Profile as Profile
    from tarantella_pp.partition.plan.hardware_spec import HardwareSpec as HardwareSpec
    from tarantella_pp.partition.plan.hardware_spec import machines as machines
    from tarantella_pp.partition.plan.plan import Plan as Plan
    from tarantella_pp.runtime.comm.ranks import barrier as barrier
    from tarantella_pp.runtime.comm.ranks import get_master_rank as get_master_rank
    from tarantella_pp.runtime.comm.ranks import get_rank as get_rank
    from tarantella_pp.runtime.comm.ranks import get_size as get_size
    from tarantella_pp.runtime.comm.ranks import init as init
    from tarantella_pp.runtime.comm.ranks import is_master_rank as is_master_rank
    from tarantella_pp.runtime.profiler import profile as profile

    __version__: str

_PUBLIC = {
    "custom_steps.distributed_optimizer": ("DistributedOptimizer",),
    "custom_steps.tensor_collectives": ("allreduce", "broadcast_variables"),
    "models.data_parallel_model": ("Model", "Sequential"),
    "models.deferred_init": ("deferred_init",),
    "models.make_plan": ("make_plan",),
    "models.pipeline_model": ("PipelineModel",),
    "runtime.profiler": ("profile",),
    "runtime.comm.ranks": (
        "barrier", "get_master_rank", "get_rank", "get_size", "init", "is_master_rank",
    ),
    "partition.graph.profile": ("Profile",),
    "partition.plan.hardware_spec": ("HardwareSpec", "machines"),
    "partition.plan.plan": ("Plan",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}
# Modules that are public names themselves.
_MODULES = ("callbacks", "errors", "models")

__all__ = [*_MODULE_OF, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    if name in _MODULE_OF or name in _MODULES:
        from tarantella_pp.dependencies import needed_for

        with needed_for(f"tarantella_pp.{name}"):
            module = importlib.import_module(f"tarantella_pp.{_MODULE_OF.get(name, name)}")
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
