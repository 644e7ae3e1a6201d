"""The private names of Keras that going on in the middle of an epoch needs."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest

from tarantella_pp.keras_internals import epochs
from tarantella_pp.keras_internals.data import get_data_adapter, order_of

pytestmark = pytest.mark.keras


def test_the_loop_of_keras_asks_the_iterator_and_the_epoch_for_where_to_begin():
    loop = inspect.getsource(epochs.trainer.TensorFlowTrainer.fit)
    assert "TFEpochIterator(" in loop
    assert "self._initial_epoch or initial_epoch" in loop
    assert "epoch_logs = dict(self._get_metrics_result_or_logs(logs))" in loop


def test_steps_that_were_trained_are_left_out_once():
    adapter = get_data_adapter(np.zeros((7, 2)), batch_size=2)
    adapter.start = epochs.EpochStart(3, 0, True)
    strategy = keras.Sequential([keras.Input((2,))]).distribute_strategy
    with epochs.starting_anywhere(keras.Model()):
        iterator = epochs.trainer.TFEpochIterator(x=adapter, distribute_strategy=strategy)
    assert [step for step, _, _ in iterator] == [3]
    assert [step for step, _, _ in iterator] == [0, 1, 2, 3]


def test_callbacks_have_what_they_remember():
    made = [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.ModelCheckpoint("file.keras"),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ]
    for callback, names in zip(made, epochs._REMEMBERED.values(), strict=True):
        callback.on_train_begin()
        callback.on_epoch_begin(0)
        missing = [name for name in names if not hasattr(callback, name)]
        assert missing in ([], ["best"])  # a ModelCheckpoint has one only if it looks at it
    assert epochs.remembered_by(keras.callbacks.CSVLogger("log.csv")) is None


def test_a_seeded_order_of_arrays_is_the_same_in_each_pass():
    keras.utils.set_random_seed(1)
    order = order_of(get_data_adapter(np.zeros((9, 2)), batch_size=2, shuffle=True))
    dataset = order.get_tf_dataset()
    first, second = (np.concatenate(list(dataset.as_numpy_iterator())) for _ in range(2))
    assert first.tolist() == second.tolist()
