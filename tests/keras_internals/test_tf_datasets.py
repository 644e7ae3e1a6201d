"""The private parts of tf.data that reading a data set in parts relies on, one by one.

When one of these fails after an upgrade, the file that it names is the place to mend.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from tarantella_pp.keras_internals import tf_datasets

pytestmark = pytest.mark.keras

ADVICE = (
    f"TensorFlow {tf.__version__} has changed a private part that "
    "tarantella_pp/keras_internals/tf_datasets.py uses: "
)


def made():
    data = tf.data.Dataset.range(9).shard(3, 1).shuffle(5, seed=2)
    data = data.map(lambda x: (x * 2, x), num_parallel_calls=2, deterministic=False)
    return data.batch(4).prefetch(3).repeat(6)


def test_steps_of_a_data_set_have_kinds_and_numbers():
    steps = list(tf_datasets.every_dataset(made()))
    expected = ["Repeat", "Prefetch", "Batch", "ParallelMap", "Shuffle", "Shard", "Range"]
    kinds = [tf_datasets.kind_of(step) for step in steps]
    assert kinds == [f"{name}Dataset" for name in expected], ADVICE + "classes, _inputs"
    repeat, prefetch, batch, mapped, shuffle, shard, _ = steps
    numbers = [
        tf_datasets.number_of(step, name)
        for step, name in (
            (repeat, "count"), (prefetch, "buffer_size"), (batch, "batch_size"),
            (mapped, "num_parallel_calls"), (shuffle, "seed2"), (shard, "index"),
            (shard, "num_shards"),
        )
    ]  # fmt: skip
    assert numbers == [6, 3, 4, 2, 2, 1, 3], ADVICE + "attributes of data sets"
    assert tf_datasets.may_change_order(mapped), ADVICE + "_deterministic"
    drops = tf_datasets.number_of(batch, "drop_remainder")
    assert drops == 0, ADVICE + "_drop_remainder"


def test_functions_of_a_data_set_are_called_and_looked_into():
    plain = tf.data.Dataset.range(3).map(lambda x: {"a": (x + 1,)})
    assert int(tf_datasets.mapping_of(plain)(tf.constant(4, tf.int64))["a"][0]) == 5, (
        ADVICE + "StructuredFunctionWrapper"
    )
    assert tf_datasets.stateful_operations(plain) == set(), ADVICE + "operations of functions"
    called = tf.function(lambda x: x * tf.random.uniform([], maxval=9, dtype=tf.int64))
    nested = tf.data.Dataset.range(3).map(lambda x: tf.cond(x > 1, lambda: called(x), lambda: x))
    assert tf_datasets.stateful_operations(nested) == {"RandomUniformInt"}, (
        ADVICE + "operations of functions that are called"
    )
    hashes = [
        tf_datasets.function_hash(tf.data.Dataset.range(3).map(lambda x, add=add: x + add))
        for add in (1, 1, 2)
    ]
    assert hashes[0] == hashes[1] != hashes[2], ADVICE + "definitions of functions"
