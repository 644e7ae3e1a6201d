"""Refuses, before anything is compiled, what of `compile()` a pipeline cannot follow."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.keras_internals.optimizers import delegates_of, is_keras_optimizer, wrapped_in
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.runtime.probes.loss_probe import whole_batch_reason
from tarantella_pp.runtime.probes.optimizer_probe import treats_weights_apart

if TYPE_CHECKING:
    from tarantella_pp.runtime.engine import Engine


def check_division(optimizer: Any, weights: Sequence[Any], num_ranks: int) -> None:
    """Refuses optimizers that would do something else on several ranks than on one."""
    if optimizer is None or num_ranks == 1:
        return
    delegates = delegates_of(wrapped_in(optimizer), weights)
    for part in dict.fromkeys([optimizer, wrapped_in(optimizer), *delegates]):
        _check_own_optimizer(part, num_ranks)
        if part in delegates and part.global_clipnorm:
            raise ConfigurationError(
                f"Optimizer {part.name} in {wrapped_in(optimizer).name} clips the gradients of "
                f"some weights by their common norm, and they are on {num_ranks} ranks. Received: "
                f"global_clipnorm={part.global_clipnorm} of an optimizer in a MultiOptimizer. Use "
                "clipnorm, which clips each by itself, or run all stages in one process."
            )


def _check_own_optimizer(optimizer: Any, num_ranks: int) -> None:
    """Refuses optimizers of the user's that look at all gradients at once."""
    if is_keras_optimizer(optimizer):
        return
    name = type(optimizer).__name__
    try:
        apart = treats_weights_apart(optimizer)
    except Exception as error:  # whatever a class of the user's may raise
        raise ConfigurationError(
            f"Optimizer {name} cannot be tried out with other weights "
            f"({type(error).__name__}: {error}), so it is not known whether it may train the "
            f"weights of {num_ranks} ranks apart from each other. Make `get_config` return what "
            "its __init__ takes, as Keras' own optimizers do, or run all stages in one process."
        ) from error
    if not apart:
        raise ConfigurationError(
            f"Optimizer {name} looks at several weights at once, which are on {num_ranks} ranks. "
            "Treat each weight by itself, or run all stages in one process."
        )


def check_loss(compiled: Any, engine: Engine) -> None:
    """Refuses a loss of the whole batch where it is asked for before all outputs are there.

    Warns of what it costs where the schedule may be chosen for it.
    """
    plan, graph = engine.plan, engine.extracted.graph
    reason = whole_batch_reason(compiled, engine.extracted)
    if reason is None or plan.num_micro_batches == 1:
        return
    if engine.schedules.sees_batch_at_once:
        return
    if not engine.schedules.free:
        raise ConfigurationError(
            f"Received: schedule={plan.schedule!r}, which computes the loss of one micro-batch "
            f"after the other, but {reason}. Leave `schedule` out, use schedule='gpipe' or "
            "num_micro_batches=1, or a loss that treats each sample by itself."
        )
    if engine.prints:
        outputs = sum(graph.tensors[tensor].bytes_per_sample for tensor in graph.outputs)
        warnings.warn(
            f"{reason[0].upper()}{reason[1:]}, so it is computed of the whole batch at once. "
            "Training runs schedule='gpipe': each stage keeps what its backward pass needs of all "
            f"num_micro_batches={plan.num_micro_batches} micro-batches, and the last one all "
            f"outputs, {format_bytes(outputs)} for each sample; `model.plan` counts both. A loss "
            "that treats each sample by itself needs neither.",
            UserWarning,
            stacklevel=3,
        )


def check_optimizer(model: Any) -> None:
    """Refuses to train weights without an optimizer."""
    if model.optimizer is None and model.trainable_weights:
        raise ConfigurationError(
            f"Training model '{model.name}' needs an optimizer. Received: optimizer=None in "
            "`compile()`; so compiled it can evaluate and predict."
        )


def warn_of_compilation(given: Mapping[str, Any]) -> None:
    """Warns of options that a pipeline does not follow, and whose numbers are the same."""
    ignored = [f"{name}=True" for name in ("run_eagerly", "jit_compile") if given[name] is True]
    if ignored:
        warnings.warn(
            f"A pipeline compiles each stage by itself, without XLA, and ignores {ignored[0]}: the "
            "numbers are the same. To debug layers line by line, train the Keras model itself.",
            UserWarning,
            stacklevel=3,
        )
