"""Data sets of which each replica reads its own samples: the same batches, or one reader."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.models.feeding.split_dataset import NotSplitError, SplitDataset
from tarantella_pp.runtime.replicas.batch_share import batch_shares

pytestmark = pytest.mark.keras

Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE
X = np.arange(22.0)


def read_files(folder):
    names = []
    for number in range(3):
        names.append(str(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as file:
            for sample in X[number::3]:
                file.write(tf.io.serialize_tensor(tf.constant(sample)).numpy())
    return (
        Dataset.from_tensor_slices(names)
        .interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2)
        .shuffle(7, seed=1)
        .map(lambda text: tf.io.parse_tensor(text, tf.float64), num_parallel_calls=AUTOTUNE)
        .map(lambda x: (tf.fill([3], x), x))
    )


def double(x):
    tf.debugging.assert_non_negative(x)
    return tf.cond(x > 5.0, lambda: x * 2.0, lambda: x)


def slices():
    return Dataset.from_tensor_slices(X)


SPLIT = {
    "one array": lambda folder: slices().map(double).batch(8),
    "shuffled anew each time": lambda folder: (
        slices().shuffle(22, seed=3).map(double, num_parallel_calls=2).batch(8).prefetch(1)
    ),
    "files": lambda folder: read_files(folder).batch(8, num_parallel_calls=2).prefetch(AUTOTUNE),
    "pairs": lambda folder: (
        Dataset.zip((slices(), slices()))
        .cache()
        .map(lambda x, y: {"x": (x,), "y": double(y)})
        .batch(8, drop_remainder=True)
    ),
    "alone in a tuple": lambda folder: (
        Dataset.from_tensor_slices((X,)).filter(lambda x: x > 2.0).map(lambda x: (x, x)).batch(4)
    ),
    "what comes afterwards": lambda folder: (
        slices().repeat(2).shuffle(5, seed=1).map(double).batch(8).skip(1).repeat(2).take(9)
    ),
}
WHOLE = {
    "no seed": (lambda: slices().shuffle(9).map(double).batch(8), "no seed"),
    "batches mapped": (lambda: slices().batch(8).map(lambda x: x), "stands behind batch"),
    "no map": (lambda: slices().batch(8), "no map"),
    "random": (
        lambda: slices().map(lambda x: x * tf.random.uniform([], dtype=tf.float64)).batch(8),
        "calls RandomUniform",
    ),
    "Python": (
        lambda: slices().map(lambda x: tf.numpy_function(np.sin, [x], tf.float64)).batch(8),
        "PyFunc",
    ),
    "generator": (
        lambda: (
            Dataset.from_generator(lambda: iter(X), output_signature=tf.TensorSpec([]))
            .map(lambda x: x)
            .batch(8)
        ),
        "GeneratorDataset",
    ),
    "another kind": (
        lambda: slices().apply(tf.data.experimental.assert_cardinality(22)).map(double).batch(8),
        "may give each rank something else",
    ),
    "out of order": (
        lambda: slices().map(double, num_parallel_calls=2, deterministic=False).batch(8),
        "does not keep the order",
    ),
    "variable": (lambda: scaled_by(tf.Variable(2.0, dtype="float64")), "calls ReadVariableOp"),
    "large batch": (lambda: slices().map(double).batch(1 << 15), "are larger than"),
    "asked for": (
        lambda: slices().map(double).batch(8).with_options(options(policy="OFF")),
        "auto_shard_policy is OFF",
    ),
}


def scaled_by(factor):
    return slices().map(lambda x: x * factor).batch(8)


def options(policy):
    made = tf.data.Options()
    policies = tf.data.experimental.AutoShardPolicy
    made.experimental_distribute.auto_shard_policy = getattr(policies, policy)
    return made


def flat(batch):
    return [leaf.numpy() for leaf in tf.nest.flatten(batch)]


@pytest.mark.parametrize(("name", "num_replicas"), [*((name, 3) for name in SPLIT), ("files", 2)])
def test_replicas_read_the_rows_of_the_very_batches(name, num_replicas, tmp_path):
    def shares(rows):
        return batch_shares(rows, 2, num_replicas)

    def data():
        tf.random.set_seed(7)
        return SPLIT[name](tmp_path)

    whole = data()
    parts = [SplitDataset.of(data()).part(shares, replica) for replica in range(num_replicas)]
    for _ in range(2):  # each pass draws another order
        batches = list(whole)
        for replica, part in enumerate(parts):
            found = list(part)
            assert len(found) == len(batches) > 1
            for (about, own), batch in zip(found, batches, strict=True):
                rows = len(flat(batch)[0])
                expected = shares(rows)[replica].own_rows
                for mine, theirs in zip(flat(own), flat(batch), strict=True):
                    np.testing.assert_array_equal(mine, theirs[expected])
                assert (about[:, 0].numpy() == rows).all()
        hashes = [[int(about[0, 1]) for about, _ in part.take(1)] for part in parts]
        assert len({tuple(each) for each in hashes}) == 1
        list(whole.take(1))


@pytest.mark.parametrize("name", WHOLE)
def test_what_may_be_different_elsewhere_is_left_to_one_reader(name):
    tf.random.set_seed(None)
    make, reason = WHOLE[name]
    with pytest.raises(NotSplitError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        SplitDataset.of(make()).part(lambda rows: batch_shares(rows, 1, 2), 0)


def test_a_fingerprint_tells_data_sets_apart():
    def made(seed=1, factor=2.0, size=8, sharded=0):
        tf.random.set_seed(7)
        data = slices().shard(2, sharded).shuffle(9, seed=seed).map(lambda x: x * factor)
        return SplitDataset.of(data.batch(size)).fingerprint

    assert made() == made()
    others = [made(seed=2), made(factor=3.0), made(size=4), made(sharded=1)]
    assert len({made(), *others}) == 5


@pytest.mark.parametrize("elements", [1, 3000])
def test_the_hash_of_a_batch_depends_on_order_and_content(elements):
    def hashes(x):
        wide = np.repeat(x[:, None], elements, axis=1)
        data = SplitDataset.of(Dataset.from_tensor_slices(wide).map(lambda x: x + 1.0).batch(11))
        return [int(about[0, 1]) for about, _ in data.part(lambda n: batch_shares(n, 1, 2), 1)]

    swapped = X[[1, 0, *range(2, 22)]]
    assert hashes(X) == hashes(X)
    assert hashes(X)[0] != hashes(swapped)[0]
    assert hashes(X)[1] == hashes(swapped)[1]


def test_a_replica_maps_no_sample_of_another():
    def refuse_large(x):
        tf.debugging.assert_less(x, tf.constant(11.0, tf.float64))
        return x

    data = SplitDataset.of(slices().map(refuse_large).batch(22))
    first, second = (data.part(lambda n: batch_shares(n, 1, 2), replica) for replica in (0, 1))
    assert len(list(first)) == 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(second)
