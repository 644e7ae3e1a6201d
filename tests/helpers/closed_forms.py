"""The bubble of named schedules as formulas, which the simulator has to come to.

Each of p ranks works for m micro-batches, and waits as long as p - 1 of them take: while the first
one comes down to it, and while the first gradient comes up, or the last one goes up::

    rank 0  F F F F . . . . B B B B                     gpipe
    rank 1  . F F F F . . B B B B .      bubble = (p - 1) / (m + p - 1) = 2 / 6
    rank 2  . . F F F F B B B B . .

With v stages on each rank the ways down and up are v times shorter. With W apart from B only B has
to go up, and W fills the time till then. Narayanan et al., SC 2021, section 2.2; Qi et al., ICLR
2024, section 2.
"""


def bubble_fraction(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1
) -> float:
    """The part of time in which ranks wait; of `zb-h1` and `zb-v` where F, B and W last equally."""
    p, m, v = num_ranks, num_micro_batches, stages_per_rank
    work, idle = {
        **dict.fromkeys(("gpipe", "1f1b", "eager-1f1b", "forward"), (m, p - 1)),
        "interleaved": (v * m, p - 1 if m >= p else v * (p - m) + m - 1),
        "zb-h1": (3 * m, max(p - 1, 2 * p - 1 - m)),
        "zb-v": (6 * m, max(p - 1, 4 * p - 2 - 2 * m)),
    }[name]
    return idle / (work + idle)
