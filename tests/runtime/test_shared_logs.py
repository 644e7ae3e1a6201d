"""Logs reach every rank as they are, or not at all with an error."""

from __future__ import annotations

import numpy as np
import pytest

from tarantella_pp.errors import CommunicationError, ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.shared_logs import LogExchange

pytestmark = pytest.mark.keras


class Gone(Communicator):
    """The second of two ranks never sends anything but the names of the logs."""

    size = 2

    def broadcast_json(self, value, root):
        return [["loss", [], "float64"]]

    def post_receive(self, specs, source, tag, label=""):
        return self

    def wait(self):
        raise CommunicationError("gives up")


def test_a_wait_for_logs_that_gives_up_is_an_error_at_once():
    """Keras swallows whatever `float()` of a value in the logs raises."""
    with pytest.raises(CommunicationError, match="gives up"):
        LogExchange(Gone(), source=1).share_logs("train", {})


def test_logs_are_floats_and_arrays():
    logs = {"b": np.float32(2.5), "a": {"z": np.ones((2, 3), "float32"), "y": np.int32(7)}}
    found = LogExchange(Communicator(), source=0).share_logs("train", logs)
    assert list(found) == ["y", "z", "b"]
    assert found["b"] == 2.5
    assert type(found["b"]) is type(found["y"]) is float
    assert found["z"].dtype == "float32"
    assert found["z"].tolist() == [[1.0] * 3] * 2


def test_a_result_that_changes_its_shape_is_refused_by_name():
    logs = LogExchange(Communicator(), source=0)
    logs.share_logs("train", {"loss": 1.0, "each": np.ones(2)})
    logs.share_logs("test", {"loss": 1.0, "each": np.ones(3)})
    with pytest.raises(ConfigurationError, match=r"each of shape \[2\], then \[3\]"):
        logs.share_logs("train", {"loss": 1.0, "each": np.ones(3)})
    logs.forget_names()
    assert logs.share_logs("train", {"each": np.ones(3)})["each"].tolist() == [1.0] * 3
