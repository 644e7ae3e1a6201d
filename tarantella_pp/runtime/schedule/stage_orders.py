"""Classic schedules, each as the order in which one stage runs its micro-batches.

Every stage runs its forwards, its input gradients and its weight gradients in increasing order of
micro-batches, so that gradients are summed in the same order whatever the schedule.
"""

from __future__ import annotations

from tarantella_pp.runtime.schedule.actions import Compute


def forward(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage for inference: forwards only.

    Args:
        stage: The stage, from 0.
        num_stages: Number of stages.
        num_micro_batches: Number of micro-batches.

    Returns:
        The stage's computations in order.
    """
    return [Compute(stage, "F", i) for i in range(num_micro_batches)]


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage as GPipe does: all forwards, then all backwards.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", NeurIPS 2019.

    Args:
        stage: The stage, from 0.
        num_stages: Number of stages.
        num_micro_batches: Number of micro-batches.

    Returns:
        The stage's computations in order.
    """
    return [Compute(stage, "F", i) for i in range(num_micro_batches)] + [
        Compute(stage, "BW", i) for i in range(num_micro_batches)
    ]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage so that it holds at most ``num_stages - stage`` micro-batches.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush),
    ICML 2021: after a warm-up each forward is followed by a backward.

    Args:
        stage: The stage, from 0.
        num_stages: Number of stages.
        num_micro_batches: Number of micro-batches.

    Returns:
        The stage's computations in order.
    """
    warm_up = min(num_stages - stage, num_micro_batches)
    order = [Compute(stage, "F", i) for i in range(warm_up)]
    for i in range(num_micro_batches):
        order.append(Compute(stage, "BW", i))
        if warm_up + i < num_micro_batches:
            order.append(Compute(stage, "F", warm_up + i))
    return order


def zb_h1(stage: int, num_stages: int, num_micro_batches: int) -> list[Compute]:
    """Orders one stage as ZB-H1: 1F1B with weight gradients put off to fill the bubble.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Stage s runs its weight gradients s
    micro-batches late, so that it holds at most ``num_stages`` micro-batches.

    Args:
        stage: The stage, from 0.
        num_stages: Number of stages.
        num_micro_batches: Number of micro-batches.

    Returns:
        The stage's computations in order.
    """
    warm_up = min(num_stages - stage, num_micro_batches)
    order = [Compute(stage, "F", i) for i in range(warm_up)]
    for i in range(num_micro_batches):
        order.append(Compute(stage, "B", i))
        if i >= stage:
            order.append(Compute(stage, "W", i - stage))
        if warm_up + i < num_micro_batches:
            order.append(Compute(stage, "F", warm_up + i))
    late = max(0, num_micro_batches - stage)
    return order + [Compute(stage, "W", i) for i in range(late, num_micro_batches)]
