"""What was freed goes back to the system, though the launcher has the C library keep it."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.internals import model_files
from tarantella_pp.launch.environment import allocator_variables
from tarantella_pp.runtime.weights.value_stream import array_of

MEBIBYTES = """
import psutil, numpy
from tarantella_pp.runtime.weights.value_stream import give_back
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

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint32")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "PIECE_BYTES", 16)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        yield file


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_variable_has_the_memory_that_was_read_into(file, dtype):
    file["a"] = expected = np.arange(60).reshape(5, 12).astype(dtype)
    variable = keras.Variable(np.zeros((5, 12), dtype), dtype=dtype)
    array = array_of(file["a"])
    variable.assign(array)
    assert (array == expected).all()
    assert np.shares_memory(np.asarray(memoryview(variable.value.read_value())), array)
    variable.assign_add(np.ones((5, 12), dtype))
    assert (variable.numpy() == expected + 1).all()


def test_what_is_made_of_an_array_is_its_own(file):
    file["a"] = np.arange(60.0).reshape(5, 12)
    array = array_of(file["a"])
    for made in (array[1:3], array.T, array + 1, array.copy(), array.astype("float32"), array[0]):
        assert (tf.convert_to_tensor(made).numpy() == np.array(made)).all()
        assert tf.convert_to_tensor(made).shape == made.shape
    other = keras.Variable(np.zeros((5, 12)), dtype="float16")
    other.assign(array)
    assert (other.numpy() == np.arange(60).reshape(5, 12)).all()
    part = array[2:]
    del array, made
    gc.collect()
    tf.random.normal((1000,))
    assert (part == np.arange(24.0, 60).reshape(3, 12)).all()  # whose memory is still there


def test_other_values_are_left_to_keras(file):
    file["small"], file["scalar"], file["text"] = (
        np.ones(3, "float32"),
        1.0,
        "many characters of text",
    )
    file["swapped"] = np.ones(9, ">f4")
    file["raw"] = np.ones(9, ml_dtypes.bfloat16).view("V2")
    assert [name for name in file if array_of(file[name]) is not None] == []
