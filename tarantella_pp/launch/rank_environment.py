"""The environment that the launcher gives to each rank."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch.guard.core_binding import cores_of_node, cores_of_task

_FAMILIES = (
    "TNT_",
    "TF_",
    "OMP_",
    "KMP_",
    "MKL_",
    "KERAS_",
    "MALLOC_",
    "XLA_",
    "CUDA_",
    "NCCL_",
    "UCX_",
)
_EVERYWHERE = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
"""What a user has set for a script; not every MPI hands it on to other hosts by itself."""
LOG_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
LOG_LEVELS = {"DEBUG": "0", "INFO": "0", "WARNING": "1", "ERROR": "2"}
"""The library's log levels, with the level of TensorFlow's native log that goes with each."""


def rank_environment(
    log_level: str, output_on_all_devices: bool, given: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables to set for every rank, on top of those given already."""
    defaults = {
        LOG_VARIABLE: LOG_LEVELS[log_level],
        **allocator_variables(),
        **product_variables(),
    }
    ours = {
        "TNT_LOG_LEVEL": log_level,
        "TNT_OUTPUT_ON_ALL_DEVICES": "1" if output_on_all_devices else "0",
    }
    unset = {name: value for name, value in defaults.items() if name not in given}
    return {**unset, **ours}


def needed_elsewhere(given: Mapping[str, str]) -> list[str]:
    """Returns the variables that ranks on other hosts need as they are here."""
    return sorted(name for name in given if name in _EVERYWHERE or name.startswith(_FAMILIES))


def allocator_variables() -> dict[str, str]:
    """Returns the thresholds that keep freed tensors in the process.

    By default glibc maps blocks from 128 KiB on afresh and gives freed memory back, and the
    kernel clears each page again at the next step: for tensors of 4 MB a page fault
    every 4 KiB, five times the cost of writing them. Older versions than 2.36 silently
    ignore a threshold over 32 MiB.
    """
    library, version = platform.libc_ver()
    if library != "glibc":
        return {}
    recent = tuple(int(part) for part in version.split(".")[:2]) >= (2, 36)
    return {
        "MALLOC_MMAP_THRESHOLD_": str((256 if recent else 32) << 20),
        "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    }


def product_variables() -> dict[str, str]:
    """Returns what has TensorFlow multiply matrices with oneDNN, as it does where there is AVX-512.

    On cores with AVX2 alone it does not by itself. There a product with the transpose of weights,
    by which gradients go back through a dense layer, takes up to six times as long for few rows,
    as each micro-batch lays out all weights anew. With oneDNN TensorFlow also takes memory from an
    allocator of its own, which gives none back to the system; it is told not to.
    """
    if platform.machine() != "x86_64":
        return {}
    return {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def parse_exports(options: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `-x NAME` and `-x NAME=VALUE` options."""
    exports = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name.isidentifier():
            raise ConfigurationError(
                f"-x takes NAME or NAME=VALUE with a name of letters, digits and underscores. "
                f"Received: -x {option}"
            )
        if not equals and name not in given:
            raise ConfigurationError(
                f"-x {name}: no such variable in the environment; give NAME=VALUE."
            )
        exports[name] = value if equals else given[name]
    return exports


def threads_per_rank(ranks_of_node: int, given: Mapping[str, str]) -> int:
    """Returns the threads of one rank, such that the ranks of a node do not share cores."""
    said = cores_of_task(given, ranks_of_node)
    return max(1, cores_of_node() // ranks_of_node) if said is None else said
