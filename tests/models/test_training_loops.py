"""Models whose class surrounds Keras' loops, by preparing the data, train as plain Keras does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tests.helpers.mpi import mpi_run
from tests.helpers.training import compiled, distance, use_float64
from tests.zoo.tasks import TEXTS, Scaled, Task

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64", "untried")]


def pipeline(task):
    return tnt.PipelineModel(task, num_stages=2, num_micro_batches=2)


def numbers_of(wrap):
    """All that a task gives, also by itself afterwards, and the model that was trained."""
    keras.utils.set_random_seed(1)
    task = compiled(Task(), sampler="random")
    model = wrap(task)
    assert model.sampler == "random"  # what it was compiled with stays
    sgd = keras.optimizers.SGD(0.3, momentum=0.9)
    model.compile(sgd, run_eagerly=model is task)  # the task's own has a default loss
    assert task.sampler == "greedy"
    logs = model.fit(TEXTS, batch_size=3, epochs=2, validation_data=TEXTS[:4], verbose=0).history
    stream = tf.data.Dataset.from_tensor_slices(TEXTS).filter(lambda text: True)  # of no length
    found = [*logs.values(), *model.fit(stream.batch(3), verbose=0).history.values()]
    found.append(model.evaluate(TEXTS, batch_size=4, verbose=0))
    found.append(model.train_on_batch(tf.constant(TEXTS)))
    found.append(model.predict(TEXTS, batch_size=2, verbose=0).tolist())
    model.preprocessor = None
    found.append(model.predict(np.arange(20).reshape(4, 5) % 16, verbose=0).tolist())
    model.preprocessor = Task().preprocessor
    if model is not task:
        model.gather()
    found.append(model.next_letters("a plane"))
    found += [weight.tolist() for weight in model.get_weights()]
    return found, model


def on_ranks():
    use_float64()
    (of_stages, model), (of_replicas, _) = map(numbers_of, (pipeline, tnt.Model))
    rank = tnt.get_rank()
    with pytest.raises(ConfigurationError, match="must have the same data"):
        model.fit(TEXTS if rank == 0 else TEXTS[::-1], verbose=0)
    history = model.fit(TEXTS if rank == 0 else None, batch_size=7, verbose=0).history
    return [of_stages, of_replicas], history["loss"]


@pytest.mark.mpi
@pytest.mark.slow
def test_tasks_take_texts_and_train_exactly():
    first, second = mpi_run(2, on_ranks, timeout=240).check().results
    assert first[1] == second[1]
    expected, _ = numbers_of(lambda task: task)
    for numbers in (*first[0], *second[0]):
        assert distance(numbers, expected) < 1e-13


def test_files_are_those_of_the_task(tmp_path):
    model = pipeline(Task(width=6))
    model.set_weights([weight + 1 for weight in model.get_weights()])
    model.save(tmp_path / "task.keras")
    with pytest.warns(UserWarning, match="custom"):  # Keras does not call the class's `compile`
        task = keras.models.load_model(tmp_path / "task.keras")
    assert type(task) is Task
    assert task.width == 6
    assert distance(task.get_weights(), model.get_weights()) == 0


def test_a_class_that_computes_around_its_graph_is_refused():
    model = Scaled()
    model(keras.Input((5,), dtype="int32"))
    with pytest.raises(UnsupportedModelError, match="Scaled"):
        pipeline(model)


def test_no_step_folds_constants():
    seen, options = [], tf.config.optimizer.get_experimental_options
    noted = keras.layers.Lambda(lambda x: seen.append(options()) or x)
    model = keras.Sequential([keras.Input((2,)), noted, keras.layers.Dense(1)])
    tnt.PipelineModel(model, 1).predict(np.ones((2, 2)), verbose=0)
    assert seen[-1]["constant_folding"] is False
    assert options().get("constant_folding", True)
