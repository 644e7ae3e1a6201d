"""The private names of Keras that training needs, all in this one file.

Written against Keras 3.14 and 3.15; `tests/runtime/test_training_contract.py` says which of them a
new version of Keras has changed.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

__all__ = [
    "CompileLoss",
    "DataAdapter",
    "added_losses",
    "build_metrics",
    "compiled_losses",
    "count_step",
    "forget_validation",
    "get_data_adapter",
    "is_keras_loss",
    "layers_in",
    "second_loss",
    "standardize_inputs",
    "strategy_of",
    "train_validation_split",
    "updates_weights_alone",
]

# Losses of Keras that reduce over the whole batch at once.
_COUPLED = (keras.losses.dice, keras.losses.tversky, keras.losses.circle)
# Optimizers of Keras that change more with each step than weights, slots and the number of steps.
_STEPPING = ("LossScaleOptimizer", "MultiOptimizer", "Nadam")


def added_losses(layer: Any) -> list[Any]:
    """Losses that a layer and those in it added in their last call, regularizers of weights not.

    Args:
        layer: A layer that has just been called.
    """
    return [loss for part in layers_in(layer) for loss in part._get_own_losses()]


def layers_in(layer: Any) -> list[Any]:
    """A layer and all layers in it.

    Args:
        layer: A layer.
    """
    return list(layer._flatten_layers())


def build_metrics(model: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Creates the variables of a compiled model's loss trackers and metrics, without data.

    Args:
        model: A compiled model.
        y: Symbolic targets, in the structure of the data.
        y_pred: Symbolic outputs, in the structure of the model.
        sample_weight: Symbolic sample weights, or `None`.
    """
    if model._compile_loss is not None:
        backend.compute_output_spec(model._compile_loss, y, y_pred, sample_weight)
    if model._compile_metrics is not None and not model._compile_metrics.built:
        model._compile_metrics.build(y, y_pred)
        # Some metrics make their variables in their first update.
        backend.compute_output_spec(model._compile_metrics.update_state, y, y_pred, sample_weight)


def second_loss(model: Any) -> Any:
    """A compiled model's loss once more, with trackers of its own; `None` without a loss.

    Args:
        model: A compiled model.
    """
    first = model._compile_loss
    if first is None:
        return None
    return CompileLoss(first._user_loss, first._user_loss_weights, output_names=first.output_names)


def compiled_losses(model: Any) -> list[Any]:
    """The loss of each of a compiled model's outputs, once they are built.

    Args:
        model: A compiled model.
    """
    if model._compile_loss is None:
        return []
    return [entry.loss for entry in model._compile_loss._flat_losses]


def is_keras_loss(loss: Any) -> bool:
    """Returns whether a loss is one of Keras' own that treats every sample by itself.

    Args:
        loss: A loss of a compiled model.
    """
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return False
    source = loss.fn if isinstance(loss, LossFunctionWrapper) else type(loss)
    return source not in _COUPLED and str(source.__module__).startswith("keras.src.losses")


def count_step(optimizer: Any) -> None:
    """Counts a step that updates nothing, for the sake of learning-rate schedules.

    Args:
        optimizer: A built optimizer.
    """
    optimizer._iterations.assign_add(1)


def forget_validation(model: Any) -> None:
    """Makes the next training validate with its own data, also after one that an error ended.

    Args:
        model: A model.
    """
    if getattr(model, "_eval_epoch_iterator", None) is not None:
        del model._eval_epoch_iterator


def updates_weights_alone(optimizer: Any) -> bool:
    """Whether a step for some weights, and one for the others, is the same as one for all.

    The number of steps has to be set back in between.

    Args:
        optimizer: Any optimizer; nothing is known of those that are not Keras' own.
    """
    name = type(optimizer).__name__
    known = getattr(keras.optimizers, name, None) is type(optimizer)
    if not known or name in _STEPPING:
        return False
    options = ("global_clipnorm", "use_ema", "gradient_accumulation_steps")
    return not any(getattr(optimizer, option) for option in options)


def standardize_inputs(model: Any, x: Any) -> list[Any]:
    """Makes the flat list of a Functional model's inputs, as it does when it is called.

    Args:
        model: A Functional model.
        x: What a data set gives for the inputs.
    """
    return list(model._standardize_inputs(x))


def strategy_of(model: Any) -> Any:
    """The strategy of `tf.distribute` that a model was made in, or that is in force now, if any.

    Args:
        model: A Keras model.
    """
    now = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    return model._distribute_strategy or now
