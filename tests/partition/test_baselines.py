"""The peers' rules: what they promise."""

from __future__ import annotations

import numpy as np

from tarantella_pp.partition.baselines import by_rules
from tarantella_pp.partition.cut import Prices
from tarantella_pp.partition.graph.ideals import Blocks


def test_rules_cut_a_chain_as_they_say():
    chain = Blocks.joined(6, [(i, i + 1) for i in range(5)])
    work, state = np.array([1.0, 1, 1, 1, 1, 7]), np.array([9.0, 1, 1, 1, 1, 1])
    found = by_rules(chain, Prices(work, np.zeros(6), np.ones(2)), state)
    assert found["equal layers"] == (0, 0, 0, 1, 1, 1)
    assert found["parameter balance"] == (0, 1, 1, 1, 1, 1)
    assert found["cost balance"] == (0, 0, 0, 0, 0, 1)
