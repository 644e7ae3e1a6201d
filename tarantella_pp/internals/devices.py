"""What TensorFlow knows of the devices of this process and has no public name for."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.client import device_lib


class Gpu(NamedTuple):
    """A GPU that this process computes with.

    Attributes:
        name: What tells it from others of its host.
        nbytes: Bytes of its memory that TensorFlow may take.
    """

    name: str
    nbytes: int


def gpu_in_use() -> Gpu | None:
    """The GPU of this process, if it has one; TensorFlow begins to use it if it has not yet."""
    if not tf.config.get_visible_devices("GPU"):
        return None
    tf.config.list_logical_devices("GPU")  # with the memory growth that was set
    found = (device for device in device_lib.list_local_devices() if device.device_type == "GPU")
    first = next(found)
    return Gpu(first.physical_device_desc, int(first.memory_limit))
