"""Waiting for other ranks without taking the core from a rank that computes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tarantella_pp.errors import CommunicationError, ConfigurationError
from tarantella_pp.runtime import guard

_LOG = logging.getLogger(__name__)

# MPI's own waits never give up the core. Here the first moments of a wait poll, each time letting
# whoever else wants the core have it; afterwards the process sleeps between polls, a fixed share
# of the time it has already waited: a message is noticed at most that much late.
SPIN_SECONDS = 400e-6
SLEEP_SHARE = 0.05
LONGEST_SLEEP = 1e-3
_CHECK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a wait may take.

    Attributes:
        warn: Seconds until a wait is logged as a warning; 0 for never.
        timeout: Seconds until a wait ends the run; 0 for never.
    """

    warn: float = 60.0
    timeout: float = 1800.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Limits:
        """Reads the limits from `TNT_WARN` and `TNT_TIMEOUT`.

        Raises:
            ConfigurationError: A value is no number of seconds.
        """
        environ = os.environ if environ is None else environ
        return cls(_seconds(environ, "TNT_WARN", 60.0), _seconds(environ, "TNT_TIMEOUT", 1800.0))


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(
            f"{name} is a number of seconds, 0 for no limit. Received: {name}={text!r}"
        )
    return value


class Waiter:
    """Waits for conditions that other ranks bring about.

    Args:
        rank: This rank, for messages.
        limits: When to warn, when to give up.
        between: Called while waiting, to move other messages on.
        report: What else is under way, for the message of a wait that took too long.
    """

    def __init__(
        self,
        rank: int,
        limits: Limits,
        between: Callable[[], object],
        report: Callable[[], str],
    ) -> None:
        self._rank = rank
        self._limits = limits
        self._between = between
        self._report = report

    def until(
        self,
        done: Callable[[], bool],
        what: Callable[[], str],
        peers: Iterable[int] = (),
        *,
        limited: bool = True,
    ) -> None:
        """Returns as soon as `done()` is true.

        Args:
            done: The condition; calls into MPI, so that messages move.
            what: What is waited for, for messages.
            peers: The ranks without which the wait cannot end.
            limited: Whether the time limits hold.

        Raises:
            CommunicationError: The wait took longer than the limit, or another rank has ended.
        """
        if done():
            return
        start = time.perf_counter()
        while time.perf_counter() - start < SPIN_SECONDS:
            os.sched_yield()
            if done():
                return
        self._sleep_until(done, what, peers, start, self._limits if limited else Limits(0.0, 0.0))

    def _sleep_until(
        self,
        done: Callable[[], bool],
        what: Callable[[], str],
        peers: Iterable[int],
        start: float,
        limits: Limits,
    ) -> None:
        warn = limits.warn
        next_check = _CHECK_SECONDS
        while not done():
            waited = time.perf_counter() - start
            if waited >= next_check:
                next_check = waited + _CHECK_SECONDS
                guard.check(peers)
                if 0 < warn <= waited:
                    warn = 0.0
                    _LOG.warning("rank %d has waited %.0f s for %s", self._rank, waited, what())
                if 0 < limits.timeout <= waited:
                    self._give_up(what(), waited)
            self._between()
            time.sleep(min(waited * SLEEP_SHARE, LONGEST_SLEEP))

    def _give_up(self, what: str, waited: float) -> None:
        raise CommunicationError(
            f"Rank {self._rank} waited {waited:.1f} s for {what} and gives up "
            f"(TNT_TIMEOUT={self._limits.timeout:g}; 0 waits for ever).\n{self._report()}"
        )
