"""What each rank reads, holds and sends: its rows, its weights, what the plan says."""

import functools
import itertools
import logging
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.runtime.comm.messages import Channel
from tarantella_pp.runtime.stage.stage import Stage
from tests.helpers import training
from tests.helpers.files import error_of, refused
from tests.helpers.mpi import mpi_run
from tests.helpers.training import LABELS, ROUNDING, SAMPLES, WEIGHTS, X, adamw, distance
from tests.zoo.models import chain

pytestmark = [pytest.mark.keras, pytest.mark.mpi, pytest.mark.usefixtures("untried")]

QUIET = {"verbose": 0}
STEPS = 3  # of 8, 8 and 6 samples
ROWS = [12, 10]  # of each replica: the last batch is cut into 2, 2, 1 and 1


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index : index + 5], LABELS[index : index + 5]


class Gone(Batches):
    def __getitem__(self, index):
        raise OSError("no disk")


def network():
    """Weights of whole cache lines, which are packed for messages without gaps."""
    return chain((6,), *(layers.Dense(8, activation=name) for name in ("tanh", "softmax")))


def started(wrap=None):
    measured = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    return training.begun(network, wrap, adamw(), "sparse_categorical_crossentropy", **measured)


def mapped(batch_size, x=X, y=LABELS):
    """A data set that maps each sample before it makes batches, in an order from a seed."""
    data = tf.data.Dataset.from_tensor_slices((x, y, WEIGHTS[: len(x)])).shuffle(9, seed=1)
    data = data.map(lambda x, y, w: (2.0 * x, y, w), num_parallel_calls=2)
    return data.batch(batch_size).prefetch(1)


def part(context, x=X):
    """What the replica of a context reads of the first two batches of 8 samples."""
    parts = context.num_input_pipelines
    own = np.arange(16).reshape(-1, parts, 8 // parts)[:, context.input_pipeline_id].ravel()
    data = tf.data.Dataset.from_tensor_slices((x[own], LABELS[own], WEIGHTS[own]))
    data = data.map(lambda x, y, w: (tf.debugging.check_numerics(x, "no number"), y, w))
    return data.batch(context.get_per_replica_batch_size(8))


def train(model):
    """Trains with arrays of all kinds; returns all numbers that come of it."""
    found = {}
    one_has_data = (X, LABELS) if tnt.get_rank() == 0 else (None, None)
    found["one reads"] = model.fit(*one_has_data, batch_size=8, shuffle=False, **QUIET).history
    held_out = (X[:7].astype("float32"), LABELS[:7])
    found["shuffled"] = model.fit(
        X, LABELS, batch_size=5, epochs=2, validation_data=held_out, **QUIET
    ).history
    found["in batches"] = model.fit(X, LABELS, batch_size=4, shuffle="batch", **QUIET).history
    found["weighted"] = model.fit(
        tf.constant(X), LABELS, batch_size=8, sample_weight=WEIGHTS, shuffle=False, **QUIET
    ).history
    found["classes"] = model.fit(
        X, LABELS, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, validation_split=0.3, steps_per_epoch=2,
        shuffle=False, **QUIET,
    ).history  # fmt: skip
    found["data set"] = model.fit(
        mapped(7), epochs=3, validation_data=mapped(4), steps_per_epoch=2, **QUIET
    ).history
    found["data set in whole epochs"] = model.fit(mapped(7), epochs=3, **QUIET).history
    wrapped = isinstance(model, tnt.PipelineModel)
    parts = part if wrapped else part(tf.distribute.InputContext())
    found["parts"] = model.fit(parts, epochs=2, validation_data=parts, **QUIET).history
    found["predicted of parts"] = model.predict(parts, **QUIET).tolist()
    batches = [(X[i : i + 5], LABELS[i : i + 5], WEIGHTS[i : i + 5]) for i in range(0, SAMPLES, 5)]
    endless = (batch for batch in itertools.cycle(batches))  # Keras takes generators only
    found["generator"] = model.fit(endless, steps_per_epoch=3, **QUIET).history
    found["sequence"] = model.fit(Batches(), shuffle=False, **QUIET).history
    found["on batch"] = [
        model.train_on_batch(X[:5], LABELS[:5]),
        model.train_on_batch(*one_has_data, class_weight={0: 1.0, 1: 2.0, 2: 0.5}),
        model.test_on_batch(X[5:6], LABELS[5:6]),
        model.predict_on_batch(X[:3]).tolist(),
    ]
    found["few"] = [model.predict(X[:n], **QUIET).tolist() for n in (1, 2, 3)]
    found["tiny"] = model.evaluate(mapped(21), **QUIET)
    found["predicted of a data set"] = model.predict(mapped(5), **QUIET).tolist()
    found["evaluated"] = model.evaluate(X[::2], LABELS[::2], batch_size=3, **QUIET)
    found["predicted"] = model.predict(X[::-1], batch_size=3, **QUIET).tolist()
    return found


class Counted:
    """What this rank sends, in bytes for each kind of message, and the samples that it runs."""

    def __init__(self):
        self.sent = Counter()
        self.rows = 0
        send, forward = Channel.send, Stage.forward

        def counting_send(channel, arrays, dest, tag, *, label=""):
            self.sent[label.split(",")[0]] += sum(np.asarray(array).nbytes for array in arrays)
            return send(channel, arrays, dest, tag, label=label)

        def counting_forward(stage, micro_batch, inputs, *more, **options):
            self.rows += int(inputs[0].shape[0])
            return forward(stage, micro_batch, inputs, *more, **options)

        Channel.send, Stage.forward = counting_send, counting_forward

    def clear(self):
        self.sent.clear()
        self.rows = 0

    def of(self, *kinds):
        return sum(count for label, count in self.sent.items() if label.startswith(kinds))


def nbytes(variables):
    return sum(8 * int(np.prod(variable.shape)) for variable in variables)


def count(model, counted):
    """Trains an epoch once all is compiled; returns what the rank did for it."""
    arguments = {"batch_size": 8, "shuffle": False, **QUIET}
    model.fit(X, LABELS, **arguments)
    counted.clear()
    model.fit(X, LABELS, **arguments)
    engine, plan = model._engine, model.plan
    position = engine.groups.pipeline.rank
    return {
        "rows": counted.rows,
        "data": counted.of("data", "batch"),
        "activations": counted.of("activations"),
        "gradients": counted.of("gradients 1>0"),
        "sums": counted.of("gradients of bucket"),
        "updates": counted.of("updated weights"),
        "weights": nbytes(w for w in model.trainable_variables if engine.weights.table.trains(w)),
        "slots": nbytes(v for v in model.optimizer.variables if len(v.shape)),
        "stage": position,
        "replica": engine.groups.replica,
        "plan": {
            "weights": plan.stages[position].parameter_bytes,
            "slots": plan.stages[position].optimizer_bytes,
            "sums": sum(plan.stages[position].reduced_bytes),
            "activations": [cut.bytes for cut in plan.cuts],
            "micro-batch": plan.batch_size // plan.num_replicas // plan.num_micro_batches,
        },
    }


def differ(model):
    """Gives one rank something else than the others; returns what all of them say to that."""
    rank = tnt.get_rank()
    other = rank == 1
    swapped = X[np.r_[1, 0, 2:SAMPLES]]
    found = []
    for x, y in (
        (X[: SAMPLES - other], LABELS[: SAMPLES - other]),
        (swapped if other else X, LABELS),
        (X, LABELS + other),
        (X if other else tf.data.Dataset.from_tensors((X, LABELS)), LABELS if other else None),
    ):
        found += [refused(lambda: call(x, y, **QUIET)) for call in (model.fit, model.evaluate)]  # noqa: B023
    found += map(
        refused,
        (
            lambda: model.train_on_batch(X, LABELS, WEIGHTS if other else None),
            lambda: model.test_on_batch(X[: 5 + other], LABELS[: 5 + other]),
            lambda: model.predict_on_batch(swapped if other else X),
        ),
    )
    for given in (
        lambda context: part(context).map(
            lambda *data: tuple(values[1 - context.input_pipeline_id :] for values in data)
        ),
        lambda context: part(context).take(1 + context.input_pipeline_id),
        lambda context: part(context).filter(
            lambda x, *_: not context.input_pipeline_id or len(x) < 4
        ),
        None if other else part,
    ):
        found.append(refused(lambda: model.fit(given, **QUIET)))  # noqa: B023
    return found


def read_apart(model, counted):
    """Trains with data that replicas read themselves; and with some that one of them cannot."""
    counted.clear()
    model.fit(part, **QUIET)
    sent = counted.of("data")
    broken = X.copy()
    broken[5, 0] = np.nan  # in the second half of the first batch
    error = error_of(lambda: model.fit(lambda context: part(context, broken), **QUIET))
    calls = [(call, Gone()) for call in (model.fit, model.evaluate, model.predict)]
    calls.append((model.predict, X.astype(str)))
    gone = [error_of(lambda: call(data, **QUIET)) for call, data in calls]  # noqa: B023
    again = model.evaluate(mapped(8), **QUIET)
    return {"sent": sent, "error": error, "gone": gone, "again": again}


def on_ranks(stages):
    training.use_float64()
    logging.basicConfig(level=logging.INFO)
    shape = {"num_stages": stages, "num_micro_batches": 2, "batch_size": 8}
    counted = Counted()
    found = {}
    for sharded in (True, False):
        options = {"shard_optimizer": sharded, **shape}
        model = started(functools.partial(tnt.PipelineModel, **options))
        start = model.get_weights()
        found[f"sharded {sharded}"] = count(model, counted)
    counted.clear()
    keras.utils.set_random_seed(1)
    found["trained"] = train(training.begin_again(model, start))
    found["sent"] = counted.of("data")
    found["refused"] = differ(model)
    found["apart"] = read_apart(model, counted)
    return found


@pytest.mark.slow
def test_each_rank_reads_holds_and_sends_its_part():
    stages = 2
    run = mpi_run(2 * stages, on_ranks, stages, timeout=300).check()
    for sharded in (False, True):
        check_counts([result[f"sharded {sharded}"] for result in run.results], stages, sharded)
    plain = train(started())
    for result in run.results:
        for name, numbers in plain.items():
            assert distance(numbers, result["trained"][name], "weights") < ROUNDING, name
        assert result["refused"] == run.results[0]["refused"]
    texts = run.results[0]["refused"]
    length, _, order, _, content, _, kind, _, *batches, size, few, ended, alone = texts
    assert "(22, 6)" in length
    assert "(21, 6)" in length
    assert order.count("float64 (22, 6), int32 (22,), hash") == 2 * stages
    assert "hash" in content
    assert "a tf.data.Dataset of 1 batches on rank 0; arrays" in kind
    assert ["[22, 6], [22], []" in text for text in batches] == [True, False, False]
    assert all("a batch of shapes" in text and "on rank 1" in text for text in batches)
    assert "parts of [3, 4] samples, where the replicas' shares are [4, 3]" in size
    assert "[1, 2] batches of replicas 0 to 1" in few
    assert "no more batch on some ranks" in ended
    assert "a function of an InputContext on rank 0; nothing on rank 1" in alone
    check_apart([result["apart"] for result in run.results], stages)
    assert run.results[0]["sent"] > 0
    for line in (
        "rank 0 reads arrays",
        "rank 0 reads a PyDataset of 4 batches",
        "rank 0 reads a tf.data.Dataset of 3 batches",
    ):
        assert line in run.stderr


def check_apart(ranks, stages):
    """Readers send targets and weights of their samples to the last ranks, and no inputs."""
    for rank, told in enumerate(ranks):
        reads = rank % stages == 0
        assert told["sent"] == reads * 2 * 8 * (4 + 8)
        assert told["again"] == ranks[0]["again"]
        assert "no number" in told["error"]
        own = "InvalidArgumentError" if rank == stages else "ConfigurationError: Rank"
        assert told["error"].startswith(own)
        reads = ["", "ConfigurationError: Rank 0 could not read the data: "][rank > 0]
        what = ["OSError: no disk"] * 3 + ["ValueError: Invalid dtype: str1024"]
        assert told["gone"] == [reads + text for text in what]


def check_counts(ranks, stages, sharded):
    """Compares what each rank did in an epoch with what the plan says."""
    for told in ranks:
        assert told["data"] == 0, "no batch takes a message"
        assert told["rows"] == ROWS[told["replica"]]
        of_sample = sum(told["plan"]["activations"]) // told["plan"]["micro-batch"]
        sent = of_sample * told["rows"]
        assert told["activations"] == (sent if told["stage"] < stages - 1 else 0)
        assert told["gradients"] == (sent if told["stage"] > 0 else 0)
    for stage in range(stages):
        replicas = [told for told in ranks if told["stage"] == stage]
        plan = replicas[0]["plan"]
        weights, slots = ([told[name] for told in replicas] for name in ("weights", "slots"))
        assert max(slots) == plan["slots"]
        if sharded:
            assert (sum(weights), sum(slots)) == (plan["weights"], 2 * plan["weights"])
        else:
            assert (weights, slots) == ([plan["weights"]] * 2, [2 * plan["weights"]] * 2)
        # Each element once to the rank that adds it up, and once back: as sum, or updated.
        sums, updates = (sum(told[name] for told in replicas) for name in ("sums", "updates"))
        expected = STEPS * plan["sums"]
        assert (sums, updates) == ((expected, expected) if sharded else (2 * expected, 0))
