"""What is compared between ranks is what they were told, and no more."""

import inspect

import keras

from tarantella_pp.runtime.comm.collective import compiled_facts


def facts(optimizer: keras.optimizers.Optimizer | str, loss: object = "mse") -> dict:
    given = inspect.signature(keras.Model.compile).bind(None, optimizer, loss, metrics=[loss])
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


def test_options_of_losses_and_metrics_make_a_difference() -> None:
    losses, metrics = keras.losses, keras.metrics
    for one, other in (
        (losses.Huber(delta=0.3), losses.Huber(delta=0.4)),
        (losses.CosineSimilarity(axis=1), losses.CosineSimilarity(axis=2)),
        (losses.BinaryCrossentropy(label_smoothing=0.1), losses.BinaryCrossentropy()),
        (metrics.TopKCategoricalAccuracy(k=2), metrics.TopKCategoricalAccuracy(k=3)),
    ):
        again = type(one).from_config(one.get_config())
        vars(again).update({n: v for n, v in vars(one).items() if n == "_fn_kwargs"})
        assert facts("sgd", one) == facts("sgd", again) != facts("sgd", other)
