"""Pipeline- and data-parallel training of Keras 3 models on TensorFlow over MPI.

    import tarantella_pp as tnt

    model = tnt.PipelineModel(keras_model, num_stages=4)    # stages x replicas on all ranks
    model = tnt.Model(keras_model)                          # data parallel alone

Names are loaded when they are first used: importing this package loads neither Keras nor
TensorFlow nor MPI, so that plans and schedules can be handled where there are none.
"""

from __future__ import annotations

import importlib
from typing import Any

# What type checkers know of these names is in `__init__.pyi`.
_PUBLIC = {
    "cli.call_function": ("run",),
    "custom_steps.custom_loops": ("DistributedOptimizer", "allreduce", "broadcast_variables"),
    "models.data_parallel_model": ("Model", "Sequential"),
    "models.deferred_init": ("deferred_init",),
    "models.make_plan": ("make_plan",),
    "models.pipeline_model": ("PipelineModel",),
    "models.profiler": ("profile",),
    "runtime.comm.communicator": (
        "barrier", "get_master_rank", "get_rank", "get_size", "init", "is_master_rank",
    ),
    "partition.profile": ("Profile",),
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
        from tarantella_pp.errors import needed_for

        with needed_for(f"tarantella_pp.{name}"):
            module = importlib.import_module(f"tarantella_pp.{_MODULE_OF.get(name, name)}")
        value = module if name in _MODULES else getattr(module, name)
    elif name == "__version__":
        from importlib import metadata

        value = metadata.version("tarantella-pp")
    else:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; docs/tarantella.md says what takes "
            "the place of Tarantella's"
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return list(__all__)
