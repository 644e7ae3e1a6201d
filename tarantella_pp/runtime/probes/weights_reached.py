"""Weights that losses, metrics, regularizers or constraints read past what they are given: tried.

Their gradients would be lost: ranks compute losses of outputs, and regularizers of one weight each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.parted import in_parts, wholes
from tarantella_pp.internals.training import (
    SecondLoss,
    compiled_loss,
    compiled_metrics,
    losses_of_outputs,
    made_by_keras,
)
from tarantella_pp.partition.graph.keras_reader import ExtractedModel


def refuse_weights_reached(
    model: Any, extracted: ExtractedModel, table: Any, last_rank: int, given: Any
) -> None:
    """Refuses functions of a compiled model that read weights past what they are given.

    What is trained or written is another one meanwhile, and what other ranks have is not there.
    """
    pairs = zip(extracted.variables, extracted.graph.weights, strict=True)
    changing = {id(variable) for variable, facts in pairs if facts.stateful}
    changing |= {id(weight) for weight in in_parts(model.trainable_variables)}

    def others(rank: int, own: Any = None) -> list[Any]:
        return wholes(
            row.variable
            for row in table.rows
            if id(row.variable) in changing or (row.ranks and rank not in row.ranks)
            if row.variable is not own
        )

    loss, metrics = compiled_loss(model), compiled_metrics(model)
    if loss is not None and not all(map(made_by_keras, losses_of_outputs(loss))):
        advice = "Add what follows from weights with `add_loss`, in a layer that has them."
        _refuse("The loss", others(last_rank), SecondLoss(loss), given, advice)
    if metrics is not None and not all(map(made_by_keras, metrics.metrics)):
        advice = "Report what follows from weights in a callback, after `get_weights()`."
        _refuse("A metric", others(last_rank), metrics.update_state, given, advice)
    for weight in model.trainable_variables:
        mine, own = table[weight], keras.KerasTensor(tuple(weight.shape), weight.dtype)
        if (regularizer := weight.regularizer) is not None and not made_by_keras(regularizer):
            advice = "Add what follows from both with `add_loss`, in a layer that has both."
            what = f"The regularizer of '{weight.path}'"
            _refuse(what, others(mine.owner, weight), regularizer, (own,), advice)
        if (constraint := weight.constraint) is not None and not made_by_keras(constraint):
            far = [r.variable for r in table.rows if r.ranks and r.trainer != mine.trainer]
            advice = "Use num_stages=1 without shard_optimizer."
            _refuse(f"The constraint of '{weight.path}'", far, constraint, (own,), advice)


def _refuse(
    what: str, weights: Sequence[Any], function: Callable[..., Any], given: Any, advice: str
) -> None:
    reached = _reached(weights, function, given)
    if reached:
        raise UnsupportedModelError(
            f"{what} reads weight '{reached[0].path}' past the model's layers, where stages and "
            f"replicas would not train as one process does. {advice}"
        )


def _reached(weights: Sequence[Any], function: Callable[..., Any], given: Any) -> list[Any]:
    """The weights that a function reads, which stand-ins without values show."""
    found: list[Any] = []

    def trace() -> None:
        values = [tf.compat.v1.placeholder(w.dtype, tuple(w.shape)) for w in weights]
        pairs = list(zip(weights, values, strict=True))
        arguments = keras.tree.map_structure(_placeholder, given)
        # Whatever it says to what has no values, it says to the first batch, too.
        with contextlib.suppress(Exception), keras.StatelessScope(state_mapping=pairs):
            function(*arguments)
        found.extend(weight for weight, value in pairs if value.consumers())

    tf.function(trace, autograph=False).get_concrete_function()
    return found


def _placeholder(described: Any) -> Any:
    is_tensor = isinstance(described, keras.KerasTensor)
    return tf.compat.v1.placeholder(described.dtype, described.shape) if is_tensor else described
