"""The private parts of TensorFlow that say what a device has.

When one of these fails after an upgrade, the file that it names is the place to mend.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tarantella_pp.internals import devices

pytestmark = pytest.mark.keras

ADVICE = (
    f"TensorFlow {tf.__version__} has changed a private part that "
    "tarantella_pp/internals/devices.py uses: "
)


def test_devices_say_what_memory_they_have():
    (cpu,) = (d for d in devices.device_lib.list_local_devices() if d.device_type == "CPU")
    assert cpu.memory_limit > 0, ADVICE + "memory_limit"
    assert isinstance(cpu.physical_device_desc, str), ADVICE + "physical_device_desc"


def test_a_gpu_is_found_where_there_is_one(monkeypatch):
    assert devices.gpu_in_use() is None
    cpu, gpu = (
        SimpleNamespace(device_type=kind, memory_limit=size, physical_device_desc=name)
        for kind, size, name in (("CPU", 7, ""), ("GPU", 9, "pci bus id: 01"))
    )
    for name in ("get_visible_devices", "list_logical_devices"):
        monkeypatch.setattr(tf.config, name, lambda kind: [kind])
    monkeypatch.setattr(devices.device_lib, "list_local_devices", lambda: [cpu, gpu])
    assert devices.gpu_in_use() == ("pci bus id: 01", 9)
