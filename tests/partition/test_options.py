"""The bytes of gradients that replicas add up at a time: the option, else the environment."""

from __future__ import annotations

import pytest

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.options import fusion_threshold_of


def test_the_option_counts_more_than_the_environment(monkeypatch):
    monkeypatch.delenv("TNT_FUSION_THRESHOLD", raising=False)
    assert fusion_threshold_of(None) == 32 * 2**20
    monkeypatch.setenv("TNT_FUSION_THRESHOLD", " 20kB ")
    assert fusion_threshold_of(None) == 20_000
    assert fusion_threshold_of("1MiB") == 2**20
    with pytest.raises(ConfigurationError, match="fusion_threshold=0"):
        fusion_threshold_of(0)
    monkeypatch.setenv("TNT_FUSION_THRESHOLD", "much")
    with pytest.raises(ConfigurationError, match="TNT_FUSION_THRESHOLD='much'"):
        fusion_threshold_of(None)
