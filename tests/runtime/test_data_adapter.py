"""The data that Keras' loops read, opened when it is needed."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tarantella_pp.runtime.batch import Need, batch_shares
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.data_adapter import DataFacts, FeedAdapter
from tarantella_pp.runtime.data_feed import DataFeed

pytestmark = pytest.mark.keras


class Opened:
    """A data adapter that counts how often it is opened, and its data set how often it is read."""

    num_batches = 2

    def __init__(self):
        self.opened = 0
        self.read = 0

    def get_tf_dataset(self):
        self.opened += 1
        return self

    def __iter__(self):
        self.read += 1
        yield tf.ones((2, 3)), tf.zeros((2,))
        yield tf.ones((1, 3)), tf.zeros((1,))


def feed():
    need = Need((0,), targets=True)
    return DataFeed(Communicator(), [need], keras.tree.flatten, lambda rows: batch_shares(rows, 1))


def test_a_data_set_is_opened_once_and_read_when_a_batch_is_asked_for():
    adapter = Opened()
    engine = SimpleNamespace(feed=feed(), communicator=Communicator())
    data = FeedAdapter(engine, adapter, DataFacts("a data set", False, 2))
    assert [batch.rows for batch in data] == [2, 1]
    iter(data)  # as Keras does at the end of an epoch
    assert (adapter.opened, adapter.read) == (1, 1)
    assert [batch.rows for batch in data] == [2, 1]
    assert (adapter.opened, adapter.read) == (1, 2)


def test_data_that_have_ended_or_failed_are_not_read_again():
    asked = []

    def source():
        asked.append(1)
        yield tf.ones((2, 3))
        raise OSError("the disk is gone")

    for data, error in ((source(), OSError), (iter([tf.ones((2, 3))]), StopIteration)):
        batches = feed().batches(data)
        assert next(batches).rows == 2
        with pytest.raises(error):
            next(batches)
        with pytest.raises(StopIteration):  # and no other rank is told a second time
            next(batches)
    assert len(asked) == 1
