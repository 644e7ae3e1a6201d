"""Processes are killed while they write: no checkpoint is lost, none is half of one."""

import copy
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tarantella_pp.callbacks import checkpoint_folder, checkpoint_writer
from tarantella_pp.callbacks.checkpoint_folder import DRAFT, DataPosition, checkpoints_in, damages
from tarantella_pp.callbacks.checkpoint_reader import newest_whole
from tarantella_pp.callbacks.checkpoint_writer import CheckpointWriter
from tarantella_pp.errors import ConfigurationError, FileError
from tarantella_pp.files import sync
from tarantella_pp.runtime.comm.communicator import Communicator

pytestmark = pytest.mark.keras

KILLS, KEEP = 20, 2
NOTHING = {
    "epoch": 0, "initial_epoch": 0, "learning_rate": None, "facts": {}, "history": {}, "logs": {},
    "callbacks": {}, "plan": None, "config": None, "optimizer": None,
    "compiled": None, "versions": {}, "written": "",
}  # fmt: skip


def begun(directory: Path, step: int, ranks: Communicator | None = None) -> CheckpointWriter:
    """Begins a checkpoint of 4 MiB, all of whose numbers are its step, and changes them then."""
    position = DataPosition("arrays", 1, step, 0, in_pass=True)
    values = {f"model/{i}": np.full(2**18, step, np.float32) for i in range(4)}
    state = {**NOTHING, "step": step, "epoch_step": step, "position": position}
    writer = CheckpointWriter(ranks or Communicator(), directory, KEEP, [0])
    writer.prepare()
    writer.write(values, state)
    for value in values.values():
        value[:] = -1
    return writer


def write(directory: Path, step: int) -> None:
    begun(directory, step).finish()


def newest(directory: Path) -> int:
    """The step of the checkpoint with which a run would go on, whole; 0 for none."""
    found = newest_whole(Communicator(), directory)
    if found is None:
        return 0
    folder, manifest = found
    (file,) = manifest.files
    tensors = checkpoint_folder.TensorFile(folder / file.name)
    assert len(tensors.slots) == 4
    assert all((tensors.read(name) == manifest.step).all() for name in tensors.slots)
    assert folder.name == f"step-{manifest.step:08d}"
    return manifest.step


def write_until_killed(directory: Path, step: int, seconds: float) -> int:
    """Has a process write one after the other, kills it; returns the last that it had written."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            while True:
                step += 1
                write(directory, step)
                os.write(told, step.to_bytes(8, "little"))
        finally:
            os._exit(1)
    os.close(told)
    try:
        first = os.read(heard, 8)  # at least one is there
        time.sleep(seconds)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the process ended by itself: it could not write"
    rest = b"".join(iter(lambda: os.read(heard, 4096), b""))
    os.close(heard)
    return int.from_bytes((first + rest)[-8:], "little")


def test_kills_while_writing_lose_no_checkpoint(tmp_path):
    directory = tmp_path / "run"
    start = time.monotonic()
    for step in range(1, KEEP + 1):
        write(directory, step)
    usual = (time.monotonic() - start) / KEEP
    draw = np.random.default_rng(1)
    interrupted = 0
    for _ in range(KILLS):
        step = newest(directory)
        written = write_until_killed(directory, step, 2 * usual * draw.random())
        assert step < written <= newest(directory) <= written + 1
        interrupted += any(directory.glob(f"{DRAFT}*"))
    assert interrupted > KILLS // 4  # or nothing was tried
    write(directory, step := newest(directory) + 1)
    assert sorted(os.listdir(directory)) == [f"step-{i:08d}" for i in (step - 1, step)]


@pytest.mark.parametrize("room", [2**40, 0])
def test_it_is_written_while_training_goes_on_if_a_copy_has_room(tmp_path, monkeypatch, room):
    done, write_tensors = threading.Event(), checkpoint_folder.write_tensors

    def late(*arguments):
        done.wait(0.0 if room == 0 else 30.0)
        return write_tensors(*arguments)

    monkeypatch.setattr(checkpoint_folder, "write_tensors", late)
    monkeypatch.setattr(checkpoint_writer, "free_memory", lambda share: room)
    writer = begun(tmp_path, 1)
    assert bool(room) != any(tmp_path.glob("*/*.safetensors"))
    done.set()
    writer.abandon()  # as after an error
    assert newest(tmp_path) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_is_written_bit_by_bit_until_somebody_waits_for_it(tmp_path, monkeypatch, fails):
    parts = []
    rest = CheckpointWriter._pause

    def after_an_hour(writer, share):
        parts.append(share)
        writer._time_between = 7200.0
        writer._resumed -= 3600.0
        rest(writer, share)

    monkeypatch.setattr(CheckpointWriter, "_pause", after_an_hour)
    writer = begun(tmp_path, 1)
    time.sleep(0.2)
    assert len(parts) < 4  # of six: length, header, four tensors
    if fails:  # on another rank, whose file is there
        other = copy.copy(writer)
        other._waited_for, other._own, other._rest = threading.Event(), Future(), None
        other._own.set_result(None)
        other.abandon()
        assert "hurry" not in os.listdir(tmp_path / "step-00000001")
    else:
        writer.finish()
    assert len(parts) == 6
    assert parts[-1] == 1.0
    assert newest(tmp_path) == 1


def test_what_another_rank_does_not_finish_has_no_name_and_is_in_nobodys_way(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_PATIENCE_SECONDS", 0.0)
    write(tmp_path, 1)
    two = Communicator()
    two.size, two.allgather_json = 2, lambda value: [value, value]
    writer = begun(tmp_path, 2, two)
    writer.abandon()
    assert newest(tmp_path) == 1
    write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    writer = begun(tmp_path, 3, two)
    while not any(tmp_path.glob("*/rank-00000.json")):
        time.sleep(0.01)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileError, match="its folder is not there"):
        writer.finish()


class Killed(BaseException):
    """What a process that is killed cannot catch, either."""


@pytest.mark.parametrize("error", [Killed(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("call", [1, 2])
def test_one_of_the_same_step_is_there_until_another_takes_its_place(
    tmp_path, monkeypatch, error, call
):
    write(tmp_path, 1)
    calls, replace = [], os.replace

    def stop(*names):
        calls.append(names)
        if len(calls) == call:
            raise error
        replace(*names)

    with monkeypatch.context() as only:
        only.setattr(os, "replace", stop)
        with pytest.raises(FileError if isinstance(error, OSError) else Killed):
            write(tmp_path, 1)
    assert newest(tmp_path) == 1
    write(tmp_path, 1)
    assert newest(tmp_path) == 1
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_none_is_half_removed(tmp_path, monkeypatch):
    def stop(folder, **options):
        if folder.exists():
            next(folder.iterdir()).unlink()
            raise Killed

    for step in range(1, KEEP + 1):
        write(tmp_path, step)
    with monkeypatch.context() as only:
        only.setattr(checkpoint_folder.shutil, "rmtree", stop)
        with pytest.raises(Killed):
            write(tmp_path, KEEP + 1)
    assert [problem for path in checkpoints_in(tmp_path) for problem in damages(path)] == []
    write(tmp_path, KEEP + 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


def test_a_folder_that_cannot_be_synced_is_no_error_and_a_file_is(tmp_path, monkeypatch):
    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


VALUES = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "turned": np.arange(6.0).reshape(2, 3).T,
    "half": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "one": np.array(7, np.int64),
    "none": np.zeros((0, 3), np.uint8),
    "flags": np.array([True, False]),
}


def write_file(path, values=VALUES):
    specs = {name: (value.dtype.name, value.shape) for name, value in values.items()}
    return checkpoint_folder.write_tensors(path, specs, values.__getitem__, lambda share: None)


def test_what_is_written_comes_back_in_the_format_of_safetensors(tmp_path):
    path = tmp_path / "file.safetensors"
    written = write_file(path)
    data = path.read_bytes()
    assert written == (len(data), hashlib.sha256(data).hexdigest())
    assert checkpoint_folder.sha256_of(path) == written[1]
    file = checkpoint_folder.TensorFile(path)
    assert list(file.slots) == list(VALUES)
    for name, value in VALUES.items():
        read = file.read(name)
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert read.tobytes() == np.ascontiguousarray(value).tobytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["half"]["dtype"] == "BF16"
    assert len(data) == 8 + length + max(told["data_offsets"][1] for told in header.values())


def test_what_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'text' has dtype object"):
        write_file(tmp_path / "file", {"text": np.array(["a"], object)})
