"""What is promised holds to rounding, so the tests of the face run in float64."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _float64(float64):
    """Uses it in each of them."""
