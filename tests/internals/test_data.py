"""The private parts of Keras that reading data relies on, one by one.

When one of these fails after an upgrade, the file that it names is the place to mend.
"""

import inspect
import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters, epoch_iterator

from tarantella_pp.internals import data as epochs

pytestmark = pytest.mark.keras


def test_data_adapters_pass_through_the_loops_of_keras():
    class Own(epochs.DataAdapter):
        num_batches = 2

        def get_tf_dataset(self):
            return [1, 2]

    own = Own()
    assert epochs.get_data_adapter(own) is own, "get_data_adapter passes adapters on"
    assert data_adapters.get_data_adapter is epochs.get_data_adapter
    assert epoch_iterator.EpochIterator(own).data_adapter is own
    given = " ".join(inspect.signature(epochs.get_data_adapter).parameters)
    expected = "x y sample_weight batch_size steps_per_epoch shuffle class_weight"
    assert given == expected, "arguments of get_data_adapter"
    (x, _, _), held_out = epochs.train_validation_split((np.arange(10), None, None), 0.2)
    assert list(x) == list(range(8)), "train_validation_split"
    assert list(held_out[0]) == [8, 9]


def test_arrays_are_told_from_other_data():
    x = np.arange(6.0).reshape(3, 2)
    assert epochs.are_arrays((x, [tf.constant(x), x], None)), "can_convert_arrays"
    assert not epochs.are_arrays((tf.data.Dataset.from_tensors(x), None, None))
    y = [np.arange(3), np.ones(3)]
    adapter = epochs.get_data_adapter(x, y, sample_weight=np.ones(3), batch_size=2)
    found = epochs.arrays_of(adapter)
    assert found[0] is x, "ArrayDataAdapter._inputs"
    assert found[1] is y
    assert len(found[2]) == 2, "weights for each target"
    assert epochs.arrays_of(epochs.get_data_adapter(tf.data.Dataset.from_tensors(x))) is None
    halves = epochs.as_sliced({"a": [x.astype("float16"), None]})
    assert halves["a"][0].dtype == keras.config.floatx(), "convert_to_sliceable"
    assert halves["a"][1] is None


@pytest.mark.parametrize("shuffle", [True, False, "batch"])
def test_numbers_of_samples_are_drawn_as_the_samples_are(shuffle):
    x = np.random.default_rng(0).normal(size=(50, 2)).astype("float32")
    found = []
    for order in (False, True):
        keras.utils.set_random_seed(3)
        adapter = epochs.get_data_adapter(x, batch_size=8, shuffle=shuffle)
        data = (epochs.order_of(adapter) if order else adapter).get_tf_dataset()
        # As Keras does, which makes an iterator at the end of an epoch that it drops.
        found.append([[batch.numpy() for batch in data] for _ in (1, 2, iter(data) and 3)])
    for samples, numbers in zip(*found, strict=True):
        assert len(numbers) == 7, "ArrayDataAdapter._batch_size"
        for one, other in zip(samples, numbers, strict=True):
            assert (one == x[other]).all(), "ArrayDataAdapter._shuffle"
    first, *others = (np.concatenate(each).tolist() for each in found[1])
    assert (first == list(range(50))) == (not shuffle)
    assert all(first == other for other in others)  # seeded, so each pass has the same order


def test_the_loop_of_keras_asks_the_iterator_and_the_epoch_for_where_to_begin():
    loop = inspect.getsource(epochs.trainer.TensorFlowTrainer.fit)
    assert "TFEpochIterator(" in loop
    assert "self._initial_epoch or initial_epoch" in loop
    assert "epoch_logs = dict(self._get_metrics_result_or_logs(logs))" in loop


def test_steps_that_were_trained_are_left_out_once():
    adapter = epochs.get_data_adapter(np.zeros((7, 2)), batch_size=2)
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
    assert not epochs.remembers(keras.callbacks.CSVLogger("log.csv"))
    assert {"_train_writer", "_val_writer"} < vars(keras.callbacks.TensorBoard).keys()


@pytest.mark.parametrize("own", [{"drops": 3}, None])
def test_a_callback_derived_from_one_of_keras_keeps_both_states(own):
    class Patient(keras.callbacks.EarlyStopping):
        def state_dict(self):
            return own

        def load_state_dict(self, state):
            self.given = state

    before, after = Patient(), Patient()
    before.wait, before.best, before.best_epoch = 2, np.float32(0.5), 4
    epochs.remind(after, json.loads(json.dumps(epochs.state_of(before))))
    assert (after.wait, after.best, after.best_epoch, after.given) == (2, 0.5, 4, own)


def test_the_folder_of_a_checkpoint_is_made_before_keras_looks(tmp_path, monkeypatch):
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}" / "a.keras")
    checkpoint.set_model(SimpleNamespace(save=lambda path, overwrite: None))
    epochs.make_its_folder(checkpoint)
    monkeypatch.setattr("os.makedirs", None)
    checkpoint.on_epoch_end(2, {})
    assert (tmp_path / "3").is_dir(), "ModelCheckpoint._get_file_path"
