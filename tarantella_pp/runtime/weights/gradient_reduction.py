"""Gradients of all replicas added up, bucket by bucket, while other things are computed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.partition.plan.gradient_buckets import Buckets, fusion_threshold_of, packed
from tarantella_pp.runtime.comm.buffers import ALIGNMENT, empty
from tarantella_pp.runtime.comm.collectives import CollectiveRequest, Steps, dtype_on_wire, finished
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import (
    to_buffer,
    to_tensor,
    variable_bytes,
    variable_dtype,
)
from tarantella_pp.runtime.weights.slices import Gradient, unmarked

Gradients: TypeAlias = "list[Gradient]"
_Array: TypeAlias = "np.ndarray[Any, Any]"

# In place of the number of rows of a gradient that is not sparse.
NOTHING, DENSE = -2, -1


@dataclass
class _Bucket:
    """Weights whose gradients travel together."""

    label: str
    weights: list[Any]
    # The replica that gets the sum of each weight's gradient; `None` if all get all
    owners: list[int] | None
    dtypes: list[np.dtype[Any]]  # their dtypes, each once; only equal ones are packed together
    tag: int  # the first of its tags: of kinds, two for each dtype, one for each weight
    dense: set[int] = field(default_factory=set)  # which weights are known to have dense gradients


# A dense sum under way, and where in its result the gradients of some weights are.
_Sum: TypeAlias = "tuple[CollectiveRequest[_Array], dict[int, slice]]"


class GradientReduction:
    """Adds up the gradients of a rank's weights over all replicas.

    A bucket of one weight is sent as it is, from the memory of its gradient. Several are packed
    one behind the other, which is the only copy::

        kernel  bias  gamma         on each replica         packed, each at a multiple of 64 bytes
        |-------|--|  |---|   -->   |-------|--.|---|  -->  reduced; the sums are parts of it

    Slices of embeddings are not added up but put one behind the other, in the order of the
    replicas, as one pipeline collects its micro-batches': Keras' optimizers treat them one
    by one. But slices at places in which samples have no say, such as positions, add up: one
    process would have them once. Replicas need not have gradients of the same kinds: a replica
    without samples has none. So each tells the others what it has, beside the gradients, and
    nobody waits for that but in the first step, where nobody knows yet which are dense.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Mapping[Any, Sequence[Any]],
        sent_as: str | None = None,
        owners: Mapping[Any, Sequence[int]] | None = None,
        guesses: bool = False,
    ) -> None:
        self.communicator = communicator
        self._sent_as = sent_as
        self._guesses = guesses  # that rows at the same places on all replicas are fixed
        self._chosen: set[int] = set()  # weights whose rows samples choose
        self._open: dict[Hashable, CollectiveRequest[Gradients]] = {}
        self._buckets: dict[Hashable, _Bucket] = {}
        tag = 0
        for key, weights in buckets.items():
            dtypes = sorted({variable_dtype(weight) for weight in weights}, key=str)
            shared_out = None if owners is None else list(owners[key])
            label = f"gradients of bucket {key}"
            self._buckets[key] = _Bucket(label, list(weights), shared_out, dtypes, tag)
            tag += 1 + 2 * len(dtypes) + len(weights)

    def start(self, key: Hashable, gradients: Sequence[Gradient]) -> None:
        """Starts to add up the gradients of a bucket; see `slices` for what they may have."""
        bucket = self._buckets[key]
        if self.communicator.size == 1:
            self._open[key] = finished(list(gradients))
        else:
            steps = self._steps(bucket, gradients)
            self._open[key] = self.communicator.start(steps, bucket.label)

    def finish(self, key: Hashable) -> Gradients:
        """Waits for the gradients of a bucket, added up over all replicas."""
        return self._open.pop(key).wait()

    def _steps(self, bucket: _Bucket, gradients: Sequence[Gradient]) -> Steps[Gradients]:
        ranks = self.communicator
        kinds = np.array(list(map(kind_of, gradients)), np.int64)
        theirs = ranks.start_allgather([kinds], tag=bucket.tag, label=f"kinds of {bucket.label}")
        # What was dense before is sent at once, beside the kinds; only the first step has to wait
        # for them.
        sums = self._start_sums(bucket, gradients, sorted(bucket.dense), late=False)
        yield [theirs]
        everywhere = theirs.wait()[0].reshape(ranks.size, -1)
        dense = set(np.flatnonzero((everywhere == DENSE).any(axis=0)).tolist())
        sums += self._start_sums(bucket, gradients, sorted(dense - bucket.dense), late=True)
        bucket.dense |= dense
        rows = np.maximum(everywhere, 0)
        slices = {
            i: self._start_slices(bucket, i, gradients[i], rows[:, i].tolist())
            for i in range(len(gradients))
            if i not in bucket.dense and (everywhere[:, i] != NOTHING).any()
        }
        yield [*(request for request, _ in sums), *slices.values()]
        found: dict[int, Gradient] = {}
        for summed, places in sums:
            result = summed.wait()
            for i, place in places.items():
                shape = tuple(bucket.weights[i].shape)
                found[i] = to_tensor(result.reshape(-1)[place].reshape(shape))
        for i, request in slices.items():
            gathered, indices = request.wait()
            by_replica = np.split(indices, np.cumsum(rows[:-1, i]))
            found[i] = self._slices(bucket.weights[i], gathered, [p for p in by_replica if p.size])
        for i, owner in enumerate(bucket.owners or ()):
            if owner != ranks.rank:
                found[i] = None
        # A weight that got no gradient on any replica has none, as in one process; zeros would let
        # optimizers move it.
        nothing = (everywhere == NOTHING).all(axis=0)
        return [None if nothing[i] else found[i] for i in range(len(gradients))]

    def _start_sums(
        self, bucket: _Bucket, gradients: Sequence[Gradient], which: Sequence[int], late: bool
    ) -> list[_Sum]:
        """Starts to add up dense gradients, each dtype by itself."""
        found = []
        for number, dtype in enumerate(bucket.dtypes):
            own = [i for i in which if variable_dtype(bucket.weights[i]) == dtype]
            if not own:
                continue
            if bucket.owners is not None:
                # Each owner gets one piece of the packed array.
                own.sort(key=bucket.owners.__getitem__)
            places = _places([bucket.weights[i] for i in own], dtype)
            arrays = [_dense(gradients[i], bucket.weights[i], dtype) for i in own]
            packed = arrays[0] if len(own) == 1 else _packed(arrays, places, dtype)
            if packed is None:
                packed = np.zeros(places[-1].stop, dtype)
            # Late sums have tags of their own: another replica may still be in the sum that began
            # at once.
            tag = bucket.tag + 1 + 2 * number + late
            found.append(self._start_sum(bucket, packed, dict(zip(own, places, strict=True)), tag))
        return found

    def _start_sum(
        self, bucket: _Bucket, packed: _Array, places: dict[int, slice], tag: int
    ) -> _Sum:
        """Starts to add up a packed array, for all replicas or for its owners."""
        ranks, wire = self.communicator, self._sent_as
        if bucket.owners is None:
            request = ranks.start_allreduce(packed, sent_as=wire, tag=tag, label=bucket.label)
            return request, places
        begins = [packed.size] * (ranks.size + 1)
        # An owner without a weight here gets an empty piece, which begins where the next one does.
        for i, place in reversed(places.items()):
            begins[: bucket.owners[i] + 1] = [place.start] * (bucket.owners[i] + 1)
        counts = [end - begin for begin, end in pairwise(begins)]
        request = ranks.start_reduce_scatter(
            packed, counts, sent_as=wire, tag=tag, label=bucket.label
        )
        # The result has only the own piece, so places in it begin there.
        base = begins[ranks.rank]
        return request, {
            i: slice(place.start - base, place.stop - base)
            for i, place in places.items()
            if bucket.owners[i] == ranks.rank
        }

    def _start_slices(
        self, bucket: _Bucket, i: int, gradient: Gradient, rows: list[int]
    ) -> CollectiveRequest[list[_Array]]:
        """Starts to put the slices of all replicas one behind the other."""
        weight = bucket.weights[i]
        wire = dtype_on_wire(variable_dtype(weight), self._sent_as)
        if gradient is None:
            values = np.empty((0, *weight.shape[1:]), wire)
            indices = np.empty(0, np.int64)
        else:
            values = to_buffer(tf.cast(gradient.values, wire))
            indices = to_buffer(tf.cast(gradient.indices, tf.int64))
        return self.communicator.start_allgather(
            [values, indices],
            rows,
            tag=bucket.tag + 1 + 2 * len(bucket.dtypes) + i,
            label=f"rows of {bucket.label}",
        )

    def _slices(self, weight: Any, values: _Array, each: Sequence[_Array]) -> Gradient:
        """Makes rows of all replicas one gradient; adds up those that no sample chooses."""
        rows, shape = tf.cast(to_tensor(values), variable_dtype(weight)), tuple(weight.shape)
        indices = np.concatenate([np.zeros(0, np.int64), *each])
        fixed = indices >= shape[0]
        own = [some[some >= shape[0]] for some in each]
        if self._guesses and not fixed.any() and self._are_positions(weight, each):
            own, fixed = list(each), np.ones_like(fixed)
        # Replicas that read data of their own may have read sequences of other lengths.
        if fixed.any() and np.array_equal(np.tile(own[0], len(own)), indices[fixed]):
            added = tf.add_n(tf.split(tf.boolean_mask(rows, fixed), len(own)))
            rows = tf.concat([tf.boolean_mask(rows, ~fixed), added], 0)
            indices = np.concatenate([indices[~fixed], own[0]])
        return unmarked(tf.IndexedSlices(rows, to_tensor(indices), tf.constant(shape)))

    def _are_positions(self, weight: Any, each: Sequence[_Array]) -> bool:
        """Whether all ranks have read the same rows, each of them once."""
        alike = bool(each) and each[0].size > 1 and all(np.array_equal(each[0], x) for x in each)
        if not alike or id(weight) in self._chosen:
            self._chosen.add(id(weight))
        elif len({*each[0]}) < each[0].size:
            name = getattr(weight, "path", weight.name)
            raise UnsupportedModelError(
                f"All ranks have read the same rows of '{name}', some of them several times. If "
                "samples choose them, they count for each rank, and if all samples have the same, "
                "as with relative positions, once: gradients do not tell. Read each row once, and "
                "take what is needed from the result; or train with tnt.Model."
            )
        return alike and len({*each[0]}) == each[0].size


def in_buckets(variables: Sequence[Any], fusion_threshold: int | float | str | None) -> Buckets:
    """Packs variables whose gradients come together, the last layers' first."""
    facts = [(i, variable_dtype(v).name, variable_bytes(v)) for i, v in enumerate(variables)]
    return packed(reversed(facts), fusion_threshold_of(fusion_threshold))


def kind_of(gradient: Gradient) -> int:
    """The number of rows of a sparse gradient; or which of the others it is."""
    if gradient is None:
        return NOTHING
    return int(gradient.indices.shape[0]) if isinstance(gradient, tf.IndexedSlices) else DENSE


def _dense(gradient: Gradient, weight: Any, dtype: np.dtype[Any]) -> _Array | None:
    """The memory of a dense gradient; slices become dense where another replica's are."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.constant(list(weight.shape))
        gradient = unmarked(tf.IndexedSlices(gradient.values, gradient.indices, shape))
    return to_buffer(tf.cast(tf.convert_to_tensor(gradient), dtype))


def _packed(
    arrays: Sequence[_Array | None], places: Sequence[slice], dtype: np.dtype[Any]
) -> _Array:
    """Gradients one behind the other, with zeros between them, and where there are none."""
    flat: _Array = empty((places[-1].stop,), dtype)
    end = 0
    for array, place in zip(arrays, places, strict=True):
        flat[end : place.start] = 0
        flat[place] = 0 if array is None else array.reshape(-1)
        end = place.stop
    return flat


def _places(weights: Sequence[Any], dtype: np.dtype[Any]) -> list[slice]:
    """Where the gradients of weights begin and end, each at an address that TensorFlow takes."""
    unit = ALIGNMENT // dtype.itemsize
    places, end = [], 0
    for weight in weights:
        begin = -(-end // unit) * unit
        end = begin + int(np.prod(tuple(weight.shape), dtype=np.int64))
        places.append(slice(begin, end))
    return places
