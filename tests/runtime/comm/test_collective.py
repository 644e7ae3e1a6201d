"""What is compared between ranks is what they were told, and no more."""

from __future__ import annotations

import inspect

import keras

from tarantella_pp.runtime.comm.collective import compiled_facts


def facts(optimizer: keras.optimizers.Optimizer) -> dict:
    given = inspect.signature(keras.Model.compile).bind(None, optimizer, "mse")
    given.apply_defaults()
    return compiled_facts(given.arguments)


def test_how_many_optimizers_a_process_has_made_makes_no_difference() -> None:
    def scaled(rate: float) -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate))

    first = scaled(0.1)
    keras.optimizers.Adam()  # the next one has another number in its name
    second = scaled(0.1)
    assert first.inner_optimizer.name != second.inner_optimizer.name
    assert facts(first) == facts(second)
    assert facts(first) != facts(scaled(0.2))
