"""Files of tensors: what is written comes back."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest

from tarantella_pp.callbacks.tensor_file import TensorFile, sha256_of, write_tensors
from tarantella_pp.errors import ConfigurationError

VALUES = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "turned": np.arange(6.0).reshape(2, 3).T,
    "half": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "one": np.array(7, np.int64),
    "none": np.zeros((0, 3), np.uint8),
    "flags": np.array([True, False]),
}


def write(path, values=VALUES):
    specs = {name: (value.dtype.name, value.shape) for name, value in values.items()}
    return write_tensors(path, specs, values.__getitem__)


def test_what_is_written_comes_back_in_the_format_of_safetensors(tmp_path):
    path = tmp_path / "file.safetensors"
    written = write(path)
    data = path.read_bytes()
    assert written == (len(data), hashlib.sha256(data).hexdigest())
    assert sha256_of(path) == written[1]
    file = TensorFile(path)
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
        write(tmp_path / "file", {"text": np.array(["a"], object)})
