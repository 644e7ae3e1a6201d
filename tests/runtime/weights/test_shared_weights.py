"""What was freed goes back to the system; what was read is the memory of its variable."""

import os
import platform
import subprocess
import sys

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest

from tarantella_pp.launch.environment import allocator_variables
from tarantella_pp.runtime.weights.shared_weights import tensor_of

MEBIBYTES = """
import psutil, numpy
from tarantella_pp.runtime.comm.buffers import give_back
resident = lambda: psutil.Process().memory_info().rss >> 20
kept, below = [numpy.ones(2**22) for _ in range(4)], numpy.ones(4)
before = resident()
kept.clear()
told = [before - resident()]
for freed in (2**20, 2**25):
    give_back(freed)
    told.append(before - resident())
print(*told)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others keep nothing")
def test_what_large_variables_took_goes_back_and_small_ones_cost_no_time():
    environment = {**os.environ, **allocator_variables()}
    command = [sys.executable, "-c", MEBIBYTES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    kept, small, large = map(int, run.stdout.split())
    assert kept < 16, run.stderr
    assert small < 16
    assert large > 110


pytestmark = pytest.mark.keras


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        yield file


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint32"]
)
def test_a_variable_has_the_memory_that_was_read_into(file, dtype):
    file["a"] = expected = np.arange(60).reshape(5, 12).astype(dtype)
    variable = keras.Variable(np.zeros((5, 12), dtype), dtype=dtype)
    read = tensor_of(file["a"])
    variable.assign(read)
    assert (variable.numpy() == expected).all()
    memory = np.asarray(memoryview(read))
    assert np.shares_memory(np.asarray(memoryview(variable.value.read_value())), memory)
    variable.assign_add(np.ones((5, 12), dtype))
    assert (variable.numpy() == expected + 1).all()


def test_other_values_are_left_to_keras(file):
    file["scalar"], file["text"] = 1.0, "many characters of text"
    file["swapped"] = np.ones(9, ">f4")
    file["raw"] = np.ones(9, ml_dtypes.bfloat16).view("V2")
    assert [name for name in file if tensor_of(file[name]) is not None] == []
