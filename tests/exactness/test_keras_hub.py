"""A sample of KerasHub's models, small, in two stages of two micro-batches.

`benchmarks/training/keras_hub.py` tries all of them. KerasHub comes with the extra `hub`, not with
`test`: it brings the whole of TensorFlow beside `tensorflow-cpu`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [pytest.mark.keras, pytest.mark.slow, pytest.mark.usefixtures("float64")]

FILE = Path(__file__).parents[2] / "benchmarks" / "training" / "keras_hub.py"
TEN = (
    "AlbertBackbone", "BartBackbone", "BertMaskedLM", "CLIPTextEncoder", "DistilBertBackbone",
    "GPT2CausalLM", "Llama3CausalLM", "MiTBackbone", "ViTImageClassifier", "WhisperBackbone",
)  # fmt: skip


@pytest.fixture(scope="module")
def tried():
    pytest.importorskip("keras_hub")
    spec = importlib.util.spec_from_file_location("tried_keras_hub", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TEN)
def test_models_of_kerashub_train_exactly(tried, name):
    row = tried.row_of(name)
    assert row.get("pipeline", row.get("plain")) < 1e-10
    assert row["operations"] >= 4
