"""Models that nobody thought of give the numbers of plain Keras, or are refused.

Five hundred of them:

    TNT_TEST_EXAMPLES=500 TNT_TEST_SESSION_SECONDS=7200 pytest tests/exactness/test_fuzz.py
"""

import gc
import os

import keras
import pytest
from hypothesis import HealthCheck, event, given, settings

from tarantella_pp.errors import TarantellaError
from tests.exactness.grammar import sentences
from tests.exactness.trials import BITS, ROUNDING
from tests.helpers.training import distance, finish, make

pytestmark = [pytest.mark.keras, pytest.mark.slow, pytest.mark.usefixtures("float64")]


def trained(sentence, **options):
    """What an epoch and an evaluation leave behind; `None` if the pipeline is refused."""
    case = sentence.case()
    options |= {"schedule": sentence.schedule} if options else {}
    try:
        return finish(make(case, **options), case, epochs=1)
    except TarantellaError as error:
        event(f"refused: {type(error).__name__}")
        return None


@settings(
    max_examples=int(os.environ.get("TNT_TEST_EXAMPLES", "1")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
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
