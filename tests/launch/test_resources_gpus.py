"""Which GPU a rank takes, with lists of devices that are made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import resources

GROWTH = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}


class TensorFlow:
    """What is asked of `tf.config`, and what is told it."""

    def __init__(self, count: int, initialized: bool = False) -> None:
        self.visible = self.all = [f"GPU:{i}" for i in range(count)]
        self.growing: list[str] = []
        self.initialized = initialized
        self.config = SimpleNamespace(
            list_physical_devices=lambda kind: self.all,
            set_visible_devices=self.set_visible_devices,
            experimental=SimpleNamespace(
                set_memory_growth=lambda gpu, on: self.growing.append(gpu)
            ),
        )

    def set_visible_devices(self, devices: list[str], kind: str) -> None:
        if self.initialized and devices != self.visible:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = devices


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(resources, "_DEVICES", tmp_path)
    for name in ("null", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()


@pytest.mark.parametrize(
    ("given", "local_rank", "taken"),
    [
        ({}, 0, "0"),
        ({}, 1, "1"),
        ({"CUDA_VISIBLE_DEVICES": "3, 5,7"}, 2, "7"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, 1, "GPU-cd"),
        ({"TNT_SHARE_GPUS": "1"}, 5, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, 1, "0"),
    ],
)
def test_each_rank_of_a_host_takes_one(given, local_rank, taken):
    environ = dict(given)
    resources.take_gpu(environ, local_rank)
    assert environ == {**given, "CUDA_VISIBLE_DEVICES": taken, **GROWTH}


def test_what_the_user_says_of_memory_stays():
    environ = {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}
    resources.take_gpu(environ, 0)
    assert environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"


@pytest.mark.parametrize("given", [{}, {"CUDA_VISIBLE_DEVICES": "1"}])
def test_more_ranks_than_gpus_are_refused(given):
    with pytest.raises(
        LaunchError, match=r"This host has [12] GPUs?, and at least 3 ranks"
    ) as error:
        resources.take_gpu(dict(given), 2)
    assert "--share-gpus or TNT_SHARE_GPUS=1" in str(error.value)


@pytest.mark.parametrize("given", ["", "-1", "-1,0"])
def test_without_gpus_nothing_changes(given):
    environ = {"CUDA_VISIBLE_DEVICES": given}
    resources.take_gpu(environ, 3)
    assert environ == {"CUDA_VISIBLE_DEVICES": given}
    assert "tensorflow" not in sys.modules


def test_without_devices_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_DEVICES", tmp_path / "missing")
    environ: dict[str, str] = {}
    resources.take_gpu(environ, 3)
    assert environ == {}


def test_a_loaded_tensorflow_is_told(monkeypatch):
    tensorflow = TensorFlow(2)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    resources.take_gpu({}, 1)
    assert tensorflow.visible == tensorflow.growing == ["GPU:1"]
    with pytest.raises(LaunchError, match="at least 3 ranks"):
        resources.take_gpu({}, 2)


def test_gpus_that_are_in_use_are_not_shared_silently(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", TensorFlow(2, initialized=True))
    with pytest.raises(LaunchError, match=r"Call tarantella_pp\.init\(\) before"):
        resources.take_gpu({}, 0)
    none = TensorFlow(0, initialized=True)
    monkeypatch.setitem(sys.modules, "tensorflow", none)
    resources.take_gpu({}, 0)
    assert none.visible == none.growing == []
