"""How much of what is dear is tried."""

import os


def more_asked_for() -> bool:
    """Whether all of what is dear is to be tried, not only a part of it."""
    return "TNT_TEST_EXAMPLES" in os.environ
