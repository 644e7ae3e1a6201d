"""Exchanges messages of all kinds, and prints what went wrong."""

from tests.helpers.message_cases import CASES, run_cases

print(run_cases([name for name in CASES if name != "a_wait_leaves_the_core_alone"]))
