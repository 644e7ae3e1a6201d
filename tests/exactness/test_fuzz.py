"""Models that nobody thought of give the numbers of plain Keras, or are refused.

Five hundred of them:

    TNT_TEST_EXAMPLES=500 TNT_TEST_SESSION_SECONDS=7200 pytest tests/exactness/test_fuzz.py
"""

from __future__ import annotations

import gc

import keras
import pytest
from hypothesis import event, given

from tarantella_pp.errors import TarantellaError
from tarantella_pp.models.pipeline_model import PipelineModel
from tests.exactness.grammar import sentences
from tests.exactness.trials import BITS, ROUNDING
from tests.helpers.draws import asked_for
from tests.helpers.training import distance

pytestmark = [pytest.mark.keras, pytest.mark.slow, pytest.mark.usefixtures("float64")]


def trained(sentence, **options):
    """What an epoch and an evaluation leave behind; `None` if the pipeline is refused."""
    keras.utils.set_random_seed(1)
    model = built = sentence.build()
    start = built.get_weights()
    quiet = {"batch_size": sentence.batch, "verbose": 0}
    try:
        if options:
            model = PipelineModel(model, schedule=sentence.schedule, **options)
            model.compile(**sentence.compiled())
        else:
            model.compile(**sentence.compiled(), run_eagerly=True)
        told = model.fit(**sentence.data(), shuffle=False, **quiet)
    except TarantellaError as error:
        assert not distance(start, built.get_weights(), "weights")
        event(f"refused: {type(error).__name__}")
        return None
    evaluation = model.evaluate(**sentence.data(), return_dict=True, **quiet)
    logs = [logged(sentence, log) for log in (told.history, evaluation)]
    return {"logs": logs, "weights": model.get_weights()}


def logged(sentence, logs):
    """Without the losses of single outputs, which in an eager step depend on the last batch."""
    return {k: v for k, v in logs.items() if sentence.outputs == 1 or not k.endswith("_loss")}


@asked_for(4)
@given(sentences())
def test_random_models_give_the_numbers_of_keras(sentence):
    keras.backend.clear_session()
    gc.collect()
    plain = trained(sentence)
    pairs = [(plain, trained(sentence, num_stages=2, num_micro_batches=3), ROUNDING)]
    if sentence.random:
        whole = trained(sentence, num_stages=2, num_micro_batches=1)
        single = trained(sentence, num_stages=1, num_micro_batches=3)
        pairs = [(plain, whole, ROUNDING), (single, pairs[0][1], BITS)]
    for expected, found, limit in pairs:
        if expected is not None and found is not None:
            event("compared")
            assert distance(expected, found) < limit
