"""The data that a script gives on several ranks: who reads them, and whether they are the same.

Arrays that all ranks have the same are read by all of them, each its own rows. Everything else is
read by one rank, which sends the others their parts: a generator, a data set that shuffles or a
`PyDataset` that draws random numbers gives each rank something else.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.keras_internals.data import (
    DataAdapter,
    are_arrays,
    get_data_adapter,
    order_of,
)
from tarantella_pp.models.feeding.batch_engine import BatchEngine
from tarantella_pp.models.feeding.data_adapter import FeedAdapter
from tarantella_pp.runtime.batch.array_rows import ArrayRows
from tarantella_pp.runtime.batch.data_feed import READER
from tarantella_pp.runtime.comm.communicator import Communicator

logger = logging.getLogger(__name__)
_NOTHING = "nothing"


@dataclass(frozen=True)
class GivenData:
    """Data of a script that are not opened yet.

    Attributes:
        parts: Model inputs, targets and sample weights.
        open: Makes an adapter of Keras of them.
    """

    parts: tuple[Any, Any, Any]
    open: Callable[[], DataAdapter]


def given_data(
    parts: tuple[Any, Any, Any], batch_size: int | None, steps: int | None, **options: Any
) -> GivenData:
    """Data of a script, with what Keras makes an adapter of them with."""
    return GivenData(
        parts, functools.partial(get_data_adapter, *parts, batch_size, steps, **options)
    )


def shared_adapters(
    engine: BatchEngine, find: Callable[[], Sequence[GivenData | None]], *, describe: bool = False
) -> list[FeedAdapter | None]:
    """Opens the user's data where they are read, and tells all ranks how much there is.

    Args:
        engine: This rank's part of training.
        find: Finds the data in the arguments of a call.
        describe: Whether to tell of arrays in one process, too, what they are.

    Raises:
        ConfigurationError: On all ranks, if they do not have the same data.
    """
    communicator = engine.communicator
    opened: list[tuple[DataAdapter | None, ArrayRows | None]] = []
    facts: list[list[Any]] = []

    def open_all() -> None:
        for given in find():
            adapter, arrays = _open(given, communicator)
            opened.append((adapter, arrays))
            known = given is not None and (describe or communicator.size > 1)
            text = _described(given, arrays) if known else _NOTHING
            size = None if adapter is None else adapter.num_batches
            facts.append([text, arrays is not None, given is None, _whole(size)])

    everyones = _all_told(communicator, open_all, facts)
    found: list[FeedAdapter | None] = []
    for (adapter, arrays), told in zip(opened, zip(*everyones, strict=True), strict=True):
        text, _, is_none, size = told[READER]
        all_have = _all_have_arrays(told)
        if is_none:
            found.append(None)
        elif all_have:
            order = order_of(adapter) if communicator.rank == READER else None
            found.append(FeedAdapter(engine, order, size, arrays, text))
        else:
            reads = adapter if communicator.rank == READER else None
            found.append(FeedAdapter(engine, reads, size, None, text))
    return found


def shared_adapter(
    engine: BatchEngine,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    steps: int | None,
) -> FeedAdapter | None:
    """Opens data to evaluate or predict, as `shared_adapters`."""
    given = given_data((x, y, sample_weight), batch_size, steps)
    return shared_adapters(engine, lambda: [given])[0]


def _open(
    given: GivenData | None, communicator: Communicator
) -> tuple[DataAdapter | None, ArrayRows | None]:
    """Opens data on the rank that reads, and arrays wherever they are."""
    if given is None:
        return None, None
    reads = communicator.rank == READER
    if not reads and (given.parts[0] is None or not are_arrays(given.parts)):
        return None, None
    adapter = given.open()
    return adapter, ArrayRows.of(adapter)


def _all_told(
    communicator: Communicator, open_all: Callable[[], None], facts: list[list[Any]]
) -> list[list[list[Any]]]:
    """Opens data on all ranks; returns what each of them tells of its own."""
    failure: Exception | None = None
    try:
        open_all()
    except Exception as error:
        failure = error
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    for rank, theirs in enumerate(communicator.allgather_json(reason)):
        if theirs is not None:
            if failure is not None and rank == communicator.rank:
                raise failure
            raise ConfigurationError(f"Rank {rank} could not read the data: {theirs}")
    return communicator.allgather_json(facts)


def _all_have_arrays(told: Sequence[Sequence[Any]]) -> bool:
    """Whether all ranks have the same arrays; refuses data that differ."""
    texts = [text for text, *_ in told]
    given = [text for text in texts if text != _NOTHING]
    if len({texts[READER], *given}) > 1:
        received = "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
        raise ConfigurationError(
            f"All ranks must have the same data, in the same order. Received: {received}. Seed "
            "what draws or shuffles them, and do not shard them: each replica takes its own rows "
            "of every batch. Or pass them on rank 0, and None on all others: then rank 0 sends "
            "their parts."
        )
    if all(has_arrays for _, has_arrays, *_ in told):
        return True
    if texts[READER] != _NOTHING:
        text = "rank %d reads %s and sends the other ranks their parts"
        logger.info(text, READER, texts[READER])
    return False


def _described(given: GivenData | None, arrays: ArrayRows | None) -> str:
    """What data are, in words that are the same on all ranks that have the same."""
    if given is None or given.parts[0] is None:
        return _NOTHING
    if arrays is not None:
        return f"arrays {arrays.fingerprint()}"
    x = given.parts[0]
    if isinstance(x, tf.data.Dataset):
        size = int(x.cardinality())
        return "a tf.data.Dataset" + (f" of {size} batches" if size >= 0 else "")
    if isinstance(x, keras.utils.PyDataset):
        return f"a PyDataset of {x.num_batches} batches"
    return f"a {type(x).__name__}"


def _whole(size: Any) -> int | None:
    return None if size is None else int(size)
