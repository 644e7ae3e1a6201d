"""Calls that all ranks must make: what differs is told on all ranks, and nobody waits for ever."""

import contextlib
import inspect
import re
import time

import keras
import numpy as np
import pytest

from tarantella_pp.runtime.comm.collective import compiled_facts
from tarantella_pp.runtime.comm.communicator import TensorSpec, world
from tests.helpers.files import error_of, refused
from tests.helpers.mpi import mpi_run

_ONE = [TensorSpec((1,), "float64")]


def call(method, **facts):
    with world().call(method, **facts):
        pass


def be_late():
    """The last rank goes on early, others still need what it has sent."""
    ours, last = world(), world().size - 1
    found = []
    for root in (0, last):
        with ours.call("fit"):
            if ours.rank == last:
                for rank in range(last):
                    ours.send([np.full(1 << 20, 3.0)], rank, 9)
            time.sleep(0.4 * (last - ours.rank))
            if ours.rank != last:
                spec = [TensorSpec((1 << 20,), "float64")]
                found.append(float(ours.post_receive(spec, last, 9).wait()[0][5]))
            found.append(ours.broadcast_json("told", root))
        call("evaluate")
    return found


def be_late_and_differ() -> list[str]:
    """Calls that are not the same on all ranks, one after the other."""
    ours, found = world(), [be_late()]
    last = ours.size - 1
    with ours.call("fit"):
        found.append(refused(lambda: call("save", path="a")))
    with ours.call("save"):
        if ours.rank == last:
            call("get_weights")  # a part of it
    for _ in range(20):
        call("tnt.barrier")
    if ours.rank == last:
        found.append(refused(lambda: call("save")))
        found.append(refused(lambda: call("evaluate")))
    else:
        time.sleep(0.2)
        found.append(refused(lambda: call("evaluate")))
        found.append(refused(lambda: call("predict")))
    call("fit")
    return found


@pytest.mark.slow
@pytest.mark.mpi
def test_late_ranks_get_what_was_sent_and_calls_that_differ_are_refused_on_all():
    run = mpi_run(3, be_late_and_differ, env={"TNT_TIMEOUT": "20"}).check()
    received = [result.pop(0) for result in run.results]
    assert received == [[3.0, "told"] * 2] * 2 + [["told"] * 2]
    assert all(result == run.results[0] for result in run.results)
    same, skipped, behind = run.results[0]
    assert same == ""
    assert "save()" in skipped
    assert "evaluate()" in behind
    assert "predict()" in behind


def wait_for_what_does_not_come(kind):
    """Each rank but the last is in a call, and waits for the last, which makes another."""
    ours = world()
    last = ours.size - 1
    call("compile")
    if ours.rank == last:
        with contextlib.suppress(KeyboardInterrupt), ours.call("fit"):  # as a script may do
            ours.send([np.zeros(1)], 0, 7)
            raise KeyboardInterrupt("a bad apple")
        first = refused(lambda: call("save"))
    else:
        with ours.call("fit"):
            if ours.rank == 0:
                ours.post_receive(_ONE, last, 7).wait()  # has been sent
            time.sleep(0.3 * ours.rank)
            first = refused(WAITS[kind])
    return [first, refused(lambda: call("evaluate"))]


WAITS = {
    "message": lambda: world().post_receive(_ONE, world().size - 1, 7, label="logs").wait(),
    "arrival": lambda: world().send([np.zeros(1 << 20)], world().size - 1, 8).wait(),
    "allgather": lambda: world().allgather_json(None),
}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "kind"), [(2, "message"), (2, "arrival"), (3, "allgather")])
def test_a_wait_that_cannot_end_names_both_calls(ranks, kind):
    run = mpi_run(ranks, wait_for_what_does_not_come, kind, env={"TNT_TIMEOUT": "20"}).check()
    for first, then in run.results:
        assert first == run.results[0][0]
        assert re.search(r"fit\(\) at .*:\d+, not finished, on rank", first)
        cause = r"after fit\(\) ended with KeyboardInterrupt: a bad apple \(.*\)"
        assert re.search(rf"save\(\) at .*:\d+ {cause} on rank {ranks - 1}", first)
        assert "No more calls are possible after ConfigurationError in fit()" in then


def wait_in_vain():
    """Rank 0 waits for a message, and then for a call, that come too late."""
    ours, found = world(), []
    if ours.rank == 1:
        with ours.call("fit"):
            time.sleep(2.5)
            for tag in (7, 8):
                ours.send([np.zeros(1)], 0, tag)
        time.sleep(2.5)
        call("save")
        return []
    with ours.call("fit"):
        request = ours.post_receive(_ONE, 1, 7, label="activations 1>0, micro-batch 2")
        second = ours.post_receive(_ONE, 1, 8, label="activations 1>0, micro-batch 3")
        found.append(error_of(request.wait))
        while not (request.ready() and second.ready()):
            time.sleep(0.01)
    return [*found, error_of(lambda: call("save"))]


@pytest.mark.slow
@pytest.mark.mpi
def test_the_first_line_of_a_time_out_says_who_waits_for_whom_in_which_call():
    run = mpi_run(2, wait_in_vain, env={"TNT_TIMEOUT": "1", "TNT_WARN": "0.5"}).check()
    message, announcement = (text.splitlines()[0] for text in run.results[0])
    assert "expected: activations 1>0, micro-batch 3 from rank 1 (tag 8)" in run.results[0][0]
    assert re.match(
        r"CommunicationError: Rank 0 waited 1\.\d s in fit\(\) at \S*:\d+ for activations 1>0, "
        r"micro-batch 2 from rank 1 \(tag 7\) and gives up",
        message,
    )
    assert re.match(
        r"CommunicationError: Rank 0 waited 1\.\d s in save\(\) at \S*:\d+ for the other ranks to "
        r"call save\(\) \(not yet: 1\) and gives up",
        announcement,
    )
    assert re.search(r"rank 0 has waited \d s in fit\(\) at \S+ for activations", run.stderr)


END_EARLY = """
import sys
import numpy as np
from tarantella_pp.runtime.comm.communicator import TensorSpec, world
ours = world()
with ours.call("compile"):
    pass
if ours.rank == 1:
    with ours.call("save" if sys.argv[1] == "call" else "fit"):
        pass
elif sys.argv[1] == "wait":
    with ours.call("fit"):
        ours.post_receive([TensorSpec((1,), "float64")], 1, 7).wait()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["call", "wait"])
def test_the_rank_with_the_call_too_many_is_blamed(tmp_path, kind):
    (tmp_path / "script.py").write_text(END_EARLY)
    run = mpi_run(2, tmp_path / "script.py", kind, env={"TNT_TIMEOUT": "20"})
    assert not run.timed_out
    assert run.returncode
    blamed = {"call": 1, "wait": 0}[kind]
    made = {"call": "save() at", "wait": "fit() at"}[kind]
    lines = [line for line in run.stderr.splitlines() if "failed first" in line]
    assert len(lines) == 1
    assert f"rank {blamed} of 2" in lines[0]
    assert made in lines[0]
    assert f"the script's end on rank {1 - blamed}" in lines[0]


def facts(optimizer: keras.optimizers.Optimizer | str, loss: object = "mse") -> dict:
    given = inspect.signature(keras.Model.compile).bind(None, optimizer, loss, metrics=[loss])
    given.apply_defaults()
    return compiled_facts(given.arguments)


def test_how_many_optimizers_a_process_has_made_makes_no_difference() -> None:
    def scaled(rate: float) -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate))

    first = scaled(0.1)
    keras.optimizers.Adam()  # the next one has another number in its name
    second = scaled(0.1)
    assert first.inner_optimizer.name != second.inner_optimizer.name
    assert facts(first) == facts(second)
    assert facts(first) != facts(scaled(0.2))


def test_options_of_losses_and_metrics_make_a_difference() -> None:
    losses, metrics = keras.losses, keras.metrics
    for one, other in (
        (losses.Huber(delta=0.3), losses.Huber(delta=0.4)),
        (losses.CosineSimilarity(axis=1), losses.CosineSimilarity(axis=2)),
        (losses.BinaryCrossentropy(label_smoothing=0.1), losses.BinaryCrossentropy()),
        (metrics.TopKCategoricalAccuracy(k=2), metrics.TopKCategoricalAccuracy(k=3)),
    ):
        again = type(one).from_config(one.get_config())
        vars(again).update({n: v for n, v in vars(one).items() if n == "_fn_kwargs"})
        assert facts("sgd", one) == facts("sgd", again) != facts("sgd", other)
