"""A batch as one rank has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tarantella_pp.runtime.replicas.batch_share import BatchShare


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch.

    Attributes:
        rows: Number of samples, of all replicas.
        shares: The share of each replica.
        share: That of this rank's replica.
        inputs: The model inputs that this rank's stages use, by position among all inputs: the
            samples of its replica.
        y: The targets of all samples, on the last rank of each pipeline; elsewhere `None`.
        sample_weight: The weights of the samples likewise.
        targets: Description of `y` and of `sample_weight`, on every rank.
        signature: Names the structure, shapes and dtypes of the batch, but for its rows.
    """

    rows: int
    shares: Sequence[BatchShare]
    share: BatchShare
    inputs: Mapping[int, tf.Tensor]
    y: Any
    sample_weight: Any
    targets: tuple[Any, Any]
    signature: bytes
