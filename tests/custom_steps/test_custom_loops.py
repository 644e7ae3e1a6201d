"""Training loops of the user's own on several ranks: what they call, the numbers of one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError
from tests.helpers.files import refused
from tests.helpers.mpi import mpi_run
from tests.helpers.own_steps import Bounded
from tests.helpers.training import use_float64
from tests.zoo.models import chain

pytestmark = pytest.mark.keras

ROWS, STEPS = 12, 4
OPTIMIZERS = {
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "adam": lambda: optimizers.AdamW(0.01, use_ema=True, clipvalue=0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.RMSprop(0.01), initial_scale=8.0),
    "bounded": lambda: Bounded(0.1, momentum=0.9),
}


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


def make_model():
    keras.utils.set_random_seed(7)
    start = keras.layers.Embedding(11, 4), keras.layers.Flatten()
    dense = keras.layers.Dense(9, activation="tanh"), keras.layers.Dense(1)
    model = chain((5,), *start, *dense, dtype="int32")
    unused = keras.Variable(np.ones(3), name="unused")  # no gradient reaches it
    empty = keras.Variable(np.ones(0), dtype="float32", name="empty")  # all of its type
    return model, [*model.trainable_variables, empty, unused]


def train(name: str, distribute, rank: int, size: int, op: str = "mean") -> list:
    model, variables = make_model()
    optimizer = distribute(OPTIMIZERS[name](), op)
    random = np.random.default_rng(3)
    for step in range(STEPS):
        tokens, targets = random.integers(0, 11, (ROWS, 5)), random.standard_normal((ROWS, 1))
        own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        with tf.GradientTape() as tape:
            errors = tf.square(model(tokens[own], training=True) - targets[own])
            loss = tf.reduce_mean(errors) if op == "mean" else tf.reduce_sum(errors) / ROWS
            loss = optimizer.scale_loss(loss)
        values = [getattr(v, "value", v) for v in variables]
        gradients = tape.gradient(loss, values)
        assert isinstance(gradients[0], tf.IndexedSlices)
        if step % 2:
            optimizer.apply(gradients, variables)
        else:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return [v.numpy().tolist() for v in [*variables, *optimizer.variables]]


def loops() -> dict:
    collectives = use_everything()
    use_float64()
    rank, size = tnt.get_rank(), tnt.get_size()

    def distribute(optimizer, op):
        # small buckets, so that there are several
        return tnt.DistributedOptimizer(optimizer, op, fusion_threshold=200)

    found = {name: train(name, distribute, rank, size) for name in OPTIMIZERS}
    found["collectives"] = collectives
    found["sum"] = train("momentum", distribute, rank, size, "sum")

    optimizer = tnt.DistributedOptimizer(keras.optimizers.SGD(1.0), wire_dtype="bfloat16")
    weight = keras.Variable(np.zeros(3))
    optimizer.apply([tf.constant([1.001, 2.0, rank], weight.dtype)], [weight])
    found["wire"] = weight.numpy().tolist()
    optimizer = tnt.DistributedOptimizer(keras.optimizers.SGD(1.0))
    weights = [keras.Variable(np.zeros(1 + rank)), weight]
    found["refused"] = [
        refused(lambda: optimizer.apply([tf.ones(v.shape, v.dtype) for v in given], given))  # noqa: B023
        for given in (weights[:1], [weight] * (1 + rank))
    ]
    return found


@pytest.mark.slow
@pytest.mark.mpi
def test_the_numbers_of_one_process(float64) -> None:
    results = mpi_run(3, loops, env={"TNT_TIMEOUT": "30"}, timeout=240).check().results
    for name in [*OPTIMIZERS, "sum"]:
        kind = "momentum" if name == "sum" else name
        alone = train(kind, lambda optimizer, op: optimizer, 0, 1)
        for found in results:
            assert found[name] == results[0][name]  # the same bits everywhere
            for mine, expected in zip(found[name], alone, strict=True):
                np.testing.assert_allclose(mine, expected, 1e-10, 1e-18, err_msg=name)
    for found in results:
        np.testing.assert_allclose(found["wire"], [-1, -2, -1])
        for text in found["refused"]:
            assert "DistributedOptimizer.apply(variables=" in text
    for found in (each["collectives"] for each in results):
        check(found)
        for name, parts in {
            "shape": ("{'loss': 'float64[1]'}", "on rank 0", "{'loss': 'float64[2]'}", "on rank 1"),
            "nest": ("('float64[]',)", "['float64[]']"),
            "ops": ("op='max'", "op='sum'"),
            "call": ("tnt.barrier()", "tnt.broadcast_variables()"),
        }.items():
            for part in parts:
                assert part in found[name], (part, found[name])


def test_it_stays_what_it_was() -> None:
    plain = keras.optimizers.Adam(0.1)
    optimizer = tnt.DistributedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert type(optimizer) is not type(tnt.DistributedOptimizer(keras.optimizers.Adam()))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(again) is keras.optimizers.Adam
    assert again.get_config() == optimizer.get_config()
    weight = keras.Variable(np.ones(2, "float32"))
    optimizer.apply([tf.ones(2)], [weight])
    again.apply([tf.ones(2)], [other := keras.Variable(np.ones(2, "float32"))])
    np.testing.assert_array_equal(weight.numpy(), other.numpy())
    with pytest.raises(ConfigurationError, match=r"tf\.function"):
        tf.function(lambda: optimizer.apply([tf.ones(2)], [weight]), autograph=False)()
    with pytest.raises(ConfigurationError, match="only some ranks would skip"):
        keras.optimizers.LossScaleOptimizer(optimizer)
    wrong = {"already": [optimizer], "optimizer='adam'": ["adam"], "op='max'": [plain, "max"]}
    for message, given in wrong.items():
        with pytest.raises(ConfigurationError, match=message):
            tnt.DistributedOptimizer(*given)
    with pytest.raises(ConfigurationError, match="fusion_threshold=-1"):
        tnt.DistributedOptimizer(keras.optimizers.SGD(), fusion_threshold=-1)


def test_stock_fit_needs_to_run_eagerly() -> None:
    data = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tnt.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ConfigurationError, match="run_eagerly=True"):
        model.fit(*data, verbose=0)
    model.compile(model.optimizer, "mse", run_eagerly=True)
    model.fit(*data, verbose=0)
    assert int(model.optimizer.iterations) == 1
