"""Ranks whose computations take longer in one step than in another, and who waits for them."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.simulation.costs import Costs, StageCosts
from tarantella_pp.simulation.timed_replay import TimedReplay

DRAWS = 32
"""Steps that are played."""
_NORMAL = NormalDist()


class StepSpread(NamedTuple):
    """How the steps of one pipeline differ.

    Attributes:
        mean: Mean seconds.
        deviation: Standard deviation of the seconds.
    """

    mean: float
    deviation: float

    def slowest_of(self, num_replicas: int) -> float:
        """Returns the mean seconds of the slowest of several pipelines, as if normal."""
        return self.mean + self.deviation * expected_maximum(num_replicas)


def step_spread(schedule: Schedule, costs: Costs, spread: float) -> StepSpread:
    """Plays steps in which the ranks are now slower, now faster.

    Of `DRAWS` steps each rank has the same speeds, in an order of its own: quantiles of a normal
    distribution, so that few steps are enough (McKay, Beckman, Conover, "A comparison of three
    methods for selecting values of input variables", Technometrics 21, 1979).
    """
    draw = random.Random(0)
    middles = [_NORMAL.inv_cdf((i + 0.5) / DRAWS) for i in range(DRAWS)]
    factors = [max(0.0, 1 + spread * z / pstdev(middles)) for z in middles]
    of_ranks = [draw.sample(factors, DRAWS) for _ in range(schedule.num_ranks)]
    seconds = []
    for own in zip(*of_ranks, strict=True):
        stages = zip(costs.stages, schedule.placement, strict=True)
        slower = tuple(_times(own[rank], stage) for stage, rank in stages)
        clock = [0.0] * schedule.num_ranks
        replay: TimedReplay[float] = TimedReplay(
            schedule, replace(costs, stages=slower), clock, max
        )
        replay.play()
        seconds.append(max(replay.clock))
    return StepSpread(fmean(seconds), pstdev(seconds))


def expected_maximum(count: int) -> float:
    """Returns the mean of the largest of several numbers of the standard normal distribution."""
    width = 1 / 128
    places = [width * (i + 0.5) for i in range(int(9 / width))]
    above = sum(1 - _NORMAL.cdf(x) ** count for x in places)
    below = sum(_NORMAL.cdf(-x) ** count for x in places)
    return width * (above - below)


def _times(factor: float, stage: StageCosts) -> StageCosts:
    """Returns a stage whose computations take so many times as long."""
    both = stage.full_backward
    return replace(
        stage,
        forward=factor * stage.forward,
        input_gradient=factor * stage.input_gradient,
        weight_gradient=factor * stage.weight_gradient,
        full_backward=None if both is None else factor * both,
        repeated=factor * stage.repeated,
    )
