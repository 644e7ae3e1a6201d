"""An exception in one line: what it says, and where the user finds it."""

import json
from pathlib import Path

import pytest

from tarantella_pp.cause import MOST_CHARACTERS, describe

GRAPH = (
    "Graph execution error:\n\nDetected at node part/embedding/GatherV2 defined at (most recent "
    "call last):\n<stack traces unavailable>\nindices[0,0] = 99 is not in [0, 4)\n"
    "\t [[{{node part/embedding/GatherV2}}]] [Op:__inference__run_forward_1610]"
)
SHAPE = (
    "Could not infer it. Error encountered:\n\nDimension size is no good\n"
    "\nArguments received by Shape.call():\n  • args"
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "ValueError"),
        ("one line", "ValueError: one line"),
        ("A class.\n\nException encountered: two\nlines", "ValueError: two"),
        (GRAPH, "ValueError: indices[0,0] = 99 is not in [0, 4) (node embedding/GatherV2)"),
        (SHAPE, "ValueError: Could not infer it. Error encountered: Dimension size is no good"),
    ],
)
def test_the_first_line_that_says_something_is_shown(message, line):
    assert describe(ValueError(message)) == line


def test_a_page_in_one_line_is_cut():
    assert len(describe(ValueError("x" * 9000))) < MOST_CHARACTERS + 20


def test_the_place_is_that_in_the_users_code():
    with pytest.raises(OSError, match="line 1") as caught:
        (Path(__file__).parent / "line 1" / "x").read_text()
    text = describe(caught.value, "in thread T")
    assert text.startswith("FileNotFoundError: [Errno 2] No such file or directory: '")
    assert "(in thread T, test_cause.py:" in text
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("no")
    assert "(test_cause.py:" in describe(caught.value)  # not json/decoder.py


@pytest.mark.keras
def test_exceptions_of_keras_and_tensorflow_themselves():
    import keras
    import tensorflow as tf

    class Tower(keras.layers.Layer):
        def call(self, x: object) -> object:
            raise ValueError("a bad apple\nsecond line")

    def samples() -> object:
        raise KeyError("sample 7")
        yield

    with pytest.raises(ValueError, match="a bad apple") as caught:
        Tower(name="left")(keras.ops.ones((2, 2)))
    assert describe(caught.value).startswith(
        "ValueError: a bad apple (layer 'left', test_cause.py:"
    )
    data = tf.data.Dataset.from_generator(samples, output_signature=tf.TensorSpec(()))
    with pytest.raises(tf.errors.OpError) as error:
        next(iter(data))
    line = Path(__file__).read_text().splitlines().index('        raise KeyError("sample 7")') + 1
    assert describe(error.value).endswith(f"KeyError: 'sample 7' (test_cause.py:{line})")
