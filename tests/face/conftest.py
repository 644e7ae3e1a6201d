"""What is promised holds to rounding, so the tests of the face run in float64."""

from __future__ import annotations

import keras
import pytest

from tests.training import use_float64


@pytest.fixture(autouse=True, scope="module")
def _float64():
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    use_float64()
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
