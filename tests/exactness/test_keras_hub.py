"""A sample of KerasHub's models, small, in two stages of two micro-batches.

`benchmarks/training/keras_hub.py` tries all of them. KerasHub comes with the extra `hub`, not with
`test`: it brings the whole of TensorFlow beside `tensorflow-cpu`.
"""

import importlib
from unittest import mock

import keras
import numpy as np
import pytest

import tarantella_pp as tnt
from tests.helpers.files import held_bytes
from tests.helpers.mpi import mpi_run
from tests.helpers.training import distance, use_float64

pytestmark = [pytest.mark.keras, pytest.mark.slow, pytest.mark.usefixtures("float64")]

NINE = (
    "AlbertBackbone", "BartBackbone", "BertMaskedLM", "CLIPTextEncoder", "DistilBertBackbone",
    "Llama3CausalLM", "MiTBackbone", "ViTImageClassifier", "WhisperBackbone",
)  # fmt: skip
TEXTS = ["a plane", "an airport", "at air", "a port", "planes at a port", "pop", "no air", "aha"]


@pytest.fixture(scope="module")
def tried():
    pytest.importorskip("keras_hub")
    return importlib.import_module("benchmarks.training.keras_hub")


@pytest.mark.parametrize("name", NINE)
def test_models_of_kerashub_train_exactly(tried, name):
    ops = {name: getattr(keras.ops, name) for name in ("zeros", "arange")}
    with mock.patch.dict(tried.PYTHON_DTYPES_MAP), mock.patch.multiple(keras.ops, **ops):
        tried.compute_in_float64()
        row = tried.row_of(name)
    assert row.get("pipeline", row.get("plain")) < 1e-10
    assert row["operations"] >= 4


def preset(hub, folder):
    letters = sorted(set("".join(TEXTS).replace(" ", "Ġ")))
    vocabulary = {text: i for i, text in enumerate(["<|endoftext|>", "at", *letters])}
    tokenizer = hub.GPT2Tokenizer(vocabulary, merges=["a t"])
    backbone = hub.GPT2Backbone(len(vocabulary), 2, 2, 16, 32, dropout=0.0, max_sequence_length=8)
    prepared = hub.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    hub.GPT2CausalLM(backbone, prepared).save_to_preset(folder)


def trained(folder, wrap):
    """A preset that is trained on texts, its share of the weights on this rank, and its losses."""
    from keras_hub.models import CausalLM

    model = wrap(lambda: CausalLM.from_preset(folder))
    whole = sum(int(np.prod(weight.shape)) * 8 for weight in model.weights)
    held = held_bytes(model)
    losses = model.fit(TEXTS, batch_size=4, epochs=2, verbose=0).history["loss"]
    return model, max(held, held_bytes(model)) / whole, losses


def on_ranks(folder, other):
    """The same on ranks, by share; the last one makes a text and a preset, too."""
    use_float64()
    model, share, losses = trained(
        folder, lambda build: tnt.PipelineModel(build, num_stages=2, num_micro_batches=2)
    )
    model.gather()
    text = ""
    if tnt.is_master_rank():
        text = model.generate("a", max_length=8)
        model.save_to_preset(other)
    return share, losses, text


@pytest.mark.mpi
def test_presets_are_read_by_share_and_trained_on_texts(tried, tmp_path):
    folder, other = str(tmp_path / "preset"), str(tmp_path / "tuned")
    keras.utils.set_random_seed(1)
    preset(tried.hub, folder)
    plain, whole, losses = trained(folder, lambda build: build())
    text = plain.generate("a", max_length=8)
    assert whole == 1.0
    results = mpi_run(2, on_ranks, folder, other, timeout=400).check().results
    for share, found, _ in results:
        assert distance(found, losses) < 1e-10
        assert share < 0.75
    assert results[-1][-1] == text
    again = tried.hub.CausalLM.from_preset(other)
    assert distance(again.get_weights(), plain.get_weights(), "weights") < 1e-10
