"""What several ranks do with each other; run by test_communicator.py, many cases per launch."""

import time
import traceback
from collections.abc import Callable, Mapping

import numpy as np

from tarantella_pp.runtime.comm import buffers, collectives
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec, world
from tests.helpers.files import error_of

DTYPES = (
    *("bool", "int8", "uint8", "int16", "int32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e5m2"),
)
SHAPES = ((), (0,), (0, 3), (1,), (3, 5), (257, 33))
Case = Callable[[Communicator], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases(names: list[str], cases: Mapping[str, Case] = CASES) -> dict[str, str]:
    """Runs cases in turn on every rank; returns the traceback of each that failed here."""
    ranks, failures = world(), {}
    for name in names:
        try:
            cases[name](ranks)
            ranks.flush()
        except Exception:
            failures[name] = traceback.format_exc()
        ranks.barrier()
    return failures


def ring(ranks: Communicator) -> tuple[int, int]:
    return (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size


def array_of(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    kind = np.dtype(dtype)
    data = np.random.default_rng(seed).integers(0, 100, shape)
    if kind == np.bool_:
        data = data % 2
    return np.asarray(data).astype(kind)


def same(one: np.ndarray, other: np.ndarray, about: str = "") -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes(), f"{about}: {one} is not {other}"


@case
def every_dtype_and_shape(ranks: Communicator) -> None:
    after, before = ring(ranks)
    for number, dtype in enumerate(DTYPES):
        arrays = [array_of(shape, dtype, ranks.rank) for shape in SHAPES]
        expected = [array_of(shape, dtype, before) for shape in SHAPES]
        specs = [TensorSpec(shape, dtype) for shape in SHAPES]
        ranks.send(arrays, after, number, label=dtype)
        got = ranks.post_receive(specs, before, number, label=dtype).wait()
        for one, other in zip(got, expected, strict=True):
            same(one, other)


@case
def memory_that_is_not_contiguous_or_not_writable(ranks: Communicator) -> None:
    after, before = ring(ranks)
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    frozen = whole.copy()
    frozen.flags.writeable = False
    sent = [whole.T, whole[::2, 1::3], frozen, memoryview(whole), np.asfortranarray(whole)]
    ranks.send(sent, after, 31)
    specs = [TensorSpec(np.asarray(array).shape, "float32") for array in sent]
    for got, expected in zip(ranks.post_receive(specs, before, 31).wait(), sent, strict=True):
        np.testing.assert_array_equal(got, np.asarray(expected))


@case
def a_tag_keeps_its_order(ranks: Communicator) -> None:
    after, before = ring(ranks)
    ahead = [ranks.post_receive([TensorSpec((), "int64")], before, 32) for _ in range(10)]
    for number in range(20):
        ranks.send([np.array(number)], after, 32)
    late = [ranks.post_receive([TensorSpec((), "int64")], before, 32) for _ in range(10)]
    assert [int(request.wait()[0]) for request in ahead + late] == list(range(20))


@case
def a_message_without_tensors(ranks: Communicator) -> None:
    after, before = ring(ranks)
    for _ in range(2):
        ranks.send([], after, 33)
        assert ranks.post_receive([], before, 33).wait() == []
        ranks.send([np.zeros(0)], after, 33)
        assert ranks.post_receive([TensorSpec((0,), "float64")], before, 33).wait()[0].size == 0
    ranks.flush()
    assert ranks.report().endswith("nothing else")  # nor is it kept as one that is yet to come


@case
def large_messages_in_pieces(ranks: Communicator) -> None:
    after, before = ring(ranks)
    normal, buffers.LARGEST_PIECE = buffers.LARGEST_PIECE, 1000
    try:
        for nbytes in (999, 1000, 1001, 4000, 65_537):
            ranks.send([np.arange(nbytes) % 251 + ranks.rank], after, 34)
            got = ranks.post_receive([TensorSpec((nbytes,), "int64")], before, 34).wait()[0]
            np.testing.assert_array_equal(got, np.arange(nbytes) % 251 + before)
            array = np.arange(nbytes, dtype=np.float64) * (ranks.rank + 1)
            ranks.allreduce(array)
            total = ranks.size * (ranks.size + 1) / 2
            np.testing.assert_array_equal(array, np.arange(nbytes) * total)
            array = np.arange(nbytes) * (1 if ranks.rank == 1 else 0)
            ranks.broadcast(array, 1)
            np.testing.assert_array_equal(array, np.arange(nbytes))
        ranks.flush()
    finally:
        buffers.LARGEST_PIECE = normal


@case
def received_memory_is_aligned_and_nobody_elses(ranks: Communicator) -> None:
    after, before = ring(ranks)
    specs = [TensorSpec((), "int8"), TensorSpec((1 << 20,), "uint8"), TensorSpec((3,), "float64")]
    kept = []
    for number in range(8):
        arrays = [np.int8(number), np.full(1 << 20, number, np.uint8), np.full(3, float(number))]
        ranks.send(arrays, after, 35)
        got = ranks.post_receive(specs, before, 35).wait()
        assert all(array.ctypes.data % buffers.ALIGNMENT == 0 for array in got)
        kept.append(got[1][100:200].reshape(2, 50))  # a view keeps the memory alive
    assert all((view == number).all() for number, view in enumerate(kept))


@case
def other_size_than_expected(ranks: Communicator) -> None:
    after, before = ring(ranks)
    for tag, rows in ((38, 2), (39, 6)):
        for count in (4, rows):
            ranks.send([np.zeros(count)], after, tag, label="logs")
        spec = [TensorSpec((4,), "float64")]
        ranks.post_receive(spec, before, tag, label="logs").wait()
        text = error_of(ranks.post_receive(spec, before, tag, label="logs").wait)
        got = "16 bytes" if rows == 2 else "more than 32 bytes"
        for part in ("logs", f"rank {before}", "float64[4]", "32 bytes", got):
            assert part in text, (part, text)
    array = np.ones(5 + (ranks.rank == 0))
    text = error_of(lambda: ranks.start_allreduce(array, label="gradients of bucket 7").wait())
    assert "gradients of bucket 7 from rank" in text


@case
def values_of_any_kind_and_size(ranks: Communicator) -> None:
    after, before = ring(ranks)
    values = [None, [float("nan"), 0.1], {"text": b"x" * 1016, "é": {}}, "y" * 100_000, 2**63 - 1]
    for value in values:
        ranks.send_json(value, [after], 44)
    assert str([ranks.receive_json(before, 44) for _ in values]) == str(values)
    everyone = [{"rank": rank, "text": "y" * rank} for rank in range(ranks.size)]
    assert ranks.allgather_json(everyone[ranks.rank]) == everyone
    for root in range(ranks.size):
        found = ranks.broadcast_json(values if ranks.rank == root else None, root)
        assert str(found) == str(values)
    assert ranks.broadcast_json(np.float32(1.5)) == 1.5
    assert "arrays of numbers" in error_of(lambda: ranks.send([np.array([{}])], after, 1))
    assert ranks.largest_tag >= 32767


@case
def allreduce_as_numpy_does(ranks: Communicator) -> None:
    numpy_op = {"sum": np.sum, "max": np.max, "min": np.min}
    for dtype in ("int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64", "bool"):
        for shape in ((), (0,), (5,), (7, 3)):
            everyone = [array_of(shape, dtype, rank) for rank in range(ranks.size)]
            for op, function in numpy_op.items():
                array = everyone[ranks.rank].copy()
                ranks.allreduce(array, op)
                wide = np.int64 if everyone[0].dtype.kind in "iub" else np.float64
                stack = np.stack([one.astype(wide) for one in everyone])
                expected = np.asarray(function(stack, axis=0)).astype(array.dtype)
                same(array, expected, f"{op} of {dtype}{shape}")
    array = np.full((4, 3), 1 + 2j * ranks.rank)
    ranks.allreduce(array.T)
    assert (array == ranks.size + 1j * ranks.size * (ranks.size - 1)).all()


def gradients_of(size: int, length: int, dtype: str) -> list[np.ndarray]:
    """For each rank numbers whose sum depends on the order in which they are added."""
    random = np.random.default_rng(length)
    found = [random.standard_normal(length) * 10.0 ** random.integers(-3, 4) for _ in range(size)]
    return [array.astype(np.dtype(dtype)) for array in found]


def sum_in_order(arrays: list[np.ndarray], wire: str | None = None) -> np.ndarray:
    dtype = arrays[0].dtype
    arrays = [array.astype(np.dtype(wire)) for array in arrays] if wire else arrays
    wide = np.float32 if arrays[0].dtype.itemsize <= 2 else arrays[0].dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = total + array.astype(wide)
    return total.astype(arrays[0].dtype).astype(dtype)


@case
def sums_are_in_the_order_of_the_ranks_whatever_their_size(ranks: Communicator) -> None:
    most = collectives.LARGEST_IN_ONE_ROUND
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        switch = most // np.dtype(dtype).itemsize // ranks.size
        for length in (1, ranks.size - 1, 1000, switch, switch + 1, 3 * switch + 2):
            everyone = gradients_of(ranks.size, length, dtype)
            mine = everyone[ranks.rank].copy()
            total = ranks.start_allreduce(mine).wait()
            mine[:] = 0  # the others have what they need of it
            same(total, sum_in_order(everyone), f"{dtype} x {length}")
            assert total.ctypes.data % buffers.ALIGNMENT == 0
            for wire in ("bfloat16", "float16", "float64"):
                narrow = np.dtype(wire).itemsize < mine.itemsize
                total = ranks.start_allreduce(everyone[ranks.rank], sent_as=wire).wait()
                same(total, sum_in_order(everyone, wire if narrow else None), f"{dtype} as {wire}")


@case
def the_parts_of_a_sum_have_its_bits(ranks: Communicator) -> None:
    for length in (5, 70_001):
        everyone = gradients_of(ranks.size, length, "float32")
        mine, first = everyone[ranks.rank], length // 3
        for wire in (None, "bfloat16"):
            whole = ranks.start_allreduce(mine, sent_as=wire).wait()
            part = ranks.start_allreduce(mine[first:], sent_as=wire).wait()
            same(part, whole[first:])
            counts = [first, length - first, *[0] * ranks.size][: ranks.size]
            own = ranks.start_reduce_scatter(mine, counts, sent_as=wire).wait()
            same(own, [whole[:first], whole[first:], whole[:0]][min(ranks.rank, 2)])
            same(ranks.start_allgather([own], counts).wait()[0], whole)


@case
def rows_of_all_ranks(ranks: Communicator) -> None:
    for rows in ([4, 0, 3, 1], [0, 5, 0, 0], [0] * 4, [70_000, 1, 2, 3]):
        counts = rows[: ranks.size]
        begin = sum(counts[: ranks.rank])
        numbers = np.arange(begin, begin + counts[ranks.rank])
        values = np.stack([numbers, numbers + 0.5], 1)
        table, keys = ranks.start_allgather([values, numbers], counts, label="rows").wait()
        np.testing.assert_array_equal(keys, np.arange(sum(counts)))
        np.testing.assert_array_equal(table[:, 1], np.arange(sum(counts)) + 0.5)
    alike = ranks.start_allgather([np.full((2, 3), ranks.rank)]).wait()[0]
    np.testing.assert_array_equal(alike[:, 1], np.repeat(np.arange(ranks.size), 2))


@case
def collectives_started_in_different_orders(ranks: Communicator) -> None:
    tags = list(range(5))
    for length in (10, 200_000):
        started = {}
        for tag in tags[ranks.rank :] + tags[: ranks.rank]:
            started[tag] = ranks.start_allreduce(np.full(length, 10.0**tag), tag=tag)
        for tag in tags[::-1] if ranks.rank else tags:
            assert (started[tag].wait() == ranks.size * 10.0**tag).all()
            assert started[tag].ready()


@case
def a_collective_goes_on_while_a_rank_waits_for_a_message(ranks: Communicator) -> None:
    other = ranks.split(0)  # the same ranks, in another group
    after, before = ring(ranks)
    request = other.start_allreduce(np.ones(300_000), label="gradients")
    spec = [TensorSpec((), "int64")]
    if ranks.rank:
        ranks.post_receive(spec, before, 45).wait()
    else:
        until = time.monotonic() + 10
        while not request.ready() and time.monotonic() < until:
            time.sleep(0.001)  # only the other ranks' waits can move it on now
        assert request.ready()
    ranks.send([np.array(1)], after, 45)
    if not ranks.rank:
        ranks.post_receive(spec, before, 45).wait()
    assert (request.wait() == ranks.size).all()


@case
def groups_talk_among_themselves(ranks: Communicator) -> None:
    group = ranks.split(ranks.rank % 2, -ranks.rank)
    members = [rank for rank in range(ranks.size) if rank % 2 == ranks.rank % 2][::-1]
    assert group.size == len(members)
    assert members[group.rank] == ranks.rank
    assert group.allgather_json(ranks.rank) == members
    array = np.array([1.0])
    group.allreduce(array)
    assert array[0] == len(members)
    if group.size > 1:
        after, before = ring(group)
        group.send([np.array(ranks.rank)], after, 1)
        request = group.post_receive([TensorSpec((), "int64")], before, 1, label="number")
        assert str(request) == f"number from rank {members[before]} (tag 1)"
        assert int(request.wait()[0]) == members[before]
        group.flush()


@case
def a_wait_leaves_the_core_alone(ranks: Communicator) -> None:
    if ranks.rank == 0:
        time.sleep(1.5)
        for rank in range(1, ranks.size):
            ranks.send([np.array(1)], rank, 40)
        ranks.flush()
        return
    request = ranks.post_receive([TensorSpec((), "int64")], 0, 40)
    start, used = time.perf_counter(), time.process_time()
    request.wait()
    share = (time.process_time() - used) / (time.perf_counter() - start)
    assert share < 0.2, share
