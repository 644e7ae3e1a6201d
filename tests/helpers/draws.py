"""How many examples a property is tried with."""

import os

from hypothesis import HealthCheck, settings


def asked_for(count: int) -> settings:
    """Settings for a property whose examples are dear, of which more are drawn on demand."""
    number = int(os.environ.get("TNT_TEST_EXAMPLES", count))
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


def more_asked_for() -> bool:
    """Whether all of what is dear is to be tried, not only a part of it."""
    return "TNT_TEST_EXAMPLES" in os.environ
