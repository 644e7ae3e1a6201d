"""What users call in their own loops, on several ranks and on one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tests.helpers.training import refused

pytestmark = pytest.mark.keras


def use_everything() -> dict:
    rank, size = tnt.get_rank(), tnt.get_size()
    everyone = np.arange(1, size + 1)
    mine = rank + 1
    nest = {
        "tensor": tf.fill((2, 3), float(mine)),
        "list": [np.full(4, mine, np.float64), mine, mine / 2, rank == 0],
        "pair": (tf.Variable([float(mine)]), keras.Variable(np.float32(mine))),
        "half": tf.constant([mine], "bfloat16"),
        "slices": tf.IndexedSlices(tf.ones((2, 1)), [0, mine], tf.constant([size + 1, 1])),
        "large": np.full(100_000, mine, np.float32),
    }
    for op in ("sum", "mean", "max", "min"):
        expected = getattr(np, op)(everyone)
        found = tnt.allreduce(nest, op)
        array, whole, number, flag = found["list"]
        assert isinstance(found["tensor"], tf.Tensor)
        np.testing.assert_array_equal(found["tensor"], np.full((2, 3), expected, "float32"))
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.float64
        array += 1  # it is ours
        np.testing.assert_array_equal(array, np.full(4, expected + 1.0))
        assert (whole, type(whole)) == (expected, float if op == "mean" else int)
        assert (number, type(number)) == (expected / 2, float)
        assert flag == getattr(np, op)(everyone == 1)
        assert isinstance(found["pair"], tuple)
        assert [float(np.squeeze(v)) for v in found["pair"]] == [expected] * 2
        assert found["half"].dtype == tf.bfloat16
        assert float(found["half"][0]) == expected
        assert found["slices"].shape == (size + 1, 1)
        assert (found["large"] == expected).all()
    assert tnt.allreduce([]) == []
    assert float(tnt.allreduce(tf.constant(2.0))) == 2.0 * size

    one, two = keras.Variable(np.full((2, 2), mine)), tf.Variable(mine, dtype=tf.int64)
    for root in range(size):
        one.assign(np.full((2, 2), mine))
        two.assign(mine)
        tnt.broadcast_variables([one, two], root)
        assert (one.numpy() == root + 1).all()
        assert int(two) == root + 1
    found = {
        "op": refused(lambda: tnt.allreduce(1.0, "product")),
        "text": refused(lambda: tnt.allreduce({"a": "b"})),
        "root": refused(lambda: tnt.broadcast_variables([one], size)),
        "graph": refused(lambda: tf.function(lambda: tnt.allreduce(tf.constant(1.0)))()),
    }
    if size > 1:
        found["shape"] = refused(lambda: tnt.allreduce({"loss": np.ones(mine)}))
        found["nest"] = refused(lambda: tnt.allreduce([1.0] if rank else (1.0,)))
        found["ops"] = refused(lambda: tnt.allreduce(1.0, "sum" if rank else "max"))
        found["call"] = refused(lambda: tnt.barrier() if rank else tnt.broadcast_variables([one]))
    return found


def check(found: dict) -> None:
    assert "Received: op='product'" in found["op"]
    assert "str 'b'" in found["text"]
    assert "root=" in found["root"]
    assert "tf.function" in found["graph"]


def test_one_process() -> None:
    check(use_everything())


def check_on_ranks(results: list) -> None:
    """Checks what ranks have found, which `test_distributed_optimizer.py` starts."""
    for found in results:
        check(found)
        for name, parts in {
            "shape": ("{'loss': 'float64[1]'}", "on rank 0", "{'loss': 'float64[2]'}", "on rank 1"),
            "nest": ("('float64[]',)", "['float64[]']"),
            "ops": ("op='max'", "op='sum'"),
            "call": ("tnt.barrier()", "tnt.broadcast_variables()"),
        }.items():
            for part in parts:
                assert part in found[name], (part, found[name])
