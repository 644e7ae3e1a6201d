"""What losses look at is found by trying them."""

import keras

from tarantella_pp.runtime.probes.loss_probe import value_kinds
from tarantella_pp.runtime.probes.parts import ROWS


def test_options_count_that_a_configuration_leaves_out() -> None:
    losses = [keras.losses.CosineSimilarity(axis=axis) for axis in (-1, 0)]
    assert losses[0].get_config() == losses[1].get_config()
    along, across = (value_kinds(loss, (None, 3)) for loss in losses)
    assert ROWS in (along or ())
    assert not across  # it looks at several samples
