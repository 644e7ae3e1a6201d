"""`profile`: measures every operation of a model on this machine, as a stage of its own."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import track

from tarantella_pp.errors import ConfigurationError, checked_count
from tarantella_pp.internals.functional import likeness_of
from tarantella_pp.internals.training import standardize_inputs
from tarantella_pp.partition.graph.calls import Call
from tarantella_pp.partition.graph.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.graph.units import sample_shape
from tarantella_pp.partition.profile import NodeProfile, Profile
from tarantella_pp.runtime.comm.tensor_buffers import values_kept
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage.stage_boundary import (
    BoundaryTensor,
    StageBoundary,
    stage_boundaries,
)
from tarantella_pp.runtime.stage.stage_module import StageLayer

# What calling a stage takes that does nothing.
CALL_SECONDS = 1.5e-4
# Seconds forward and backward, and bytes kept.
Measured = tuple[float, float, int | None]
# Profiles of this process: by fingerprint, rows and threads.
_KNOWN: dict[tuple[str, int, int], Profile] = {}


def profile(
    model: keras.Model | ExtractedModel,
    batch: Any = 32,
    *,
    repeats: int = 5,
    cache: str | os.PathLike[str] | None = None,
    verbose: bool = True,
) -> Profile:
    """Measures the forward and the backward pass of each operation of a model on this machine.

    Each runs compiled, as a stage of its own, on micro-batches of two sizes, `batch` and a
    quarter of it. A first run is left out, the median of the others counts, and what an operation
    that does nothing takes is subtracted. Operations that are alike are measured once. The
    model's state stays as it was.

    Args:
        model: A Functional or built Sequential model, or what was read of one.
        batch: Inputs of the model for one micro-batch, or its number of samples, for random ones.
        repeats: How often each operation runs.
        cache: A JSON file to take the profile from, if it holds one of this model, of as many
            samples and threads, and to write it to otherwise. Profiles of this process are
            kept in any case.
        verbose: Whether to show a progress bar.

    Returns:
        The profile.

    Raises:
        ConfigurationError: `batch` or `repeats` cannot work.
        UnsupportedModelError: The model cannot be cut into stages.
        PlanError: The file holds no valid profile.
    """
    extracted = extract(model)
    checked_count("repeats", repeats)
    given = _inputs(extracted, batch)
    rows, threads = int(given[0].shape[0]), tf.config.threading.get_intra_op_parallelism_threads()
    own = os.environ.get("TF_NUM_INTRAOP_THREADS") or len(os.sched_getaffinity(0))
    threads = int(threads or own)
    key = (extracted.graph.fingerprint(), rows, threads)
    measured = _KNOWN.get(key)
    if measured is None and cache is not None and Path(cache).exists():
        measured = Profile.load(cache)
        if (measured.fingerprint, measured.rows[-1], measured.threads) != key:
            measured = None
    if measured is None:
        sizes = sorted({max(1, rows // 4), rows})
        with values_kept([v for v in extracted.variables if not v.trainable]):  # statistics, seeds
            found = [_measure(extracted, [x[:n] for x in given], repeats, verbose) for n in sizes]
        nodes = map(_profile_of, extracted.calls, zip(*found, strict=True))
        measured = Profile(extracted.model.name, key[0], threads, tuple(sizes), tuple(nodes))
    if cache is not None:
        measured.save(cache)
    _KNOWN[key] = measured
    return measured


def _inputs(extracted: ExtractedModel, batch: Any) -> list[tf.Tensor]:
    if not isinstance(batch, int):
        given = [tf.convert_to_tensor(x) for x in standardize_inputs(extracted.model, batch)]
    else:
        rows = checked_count("batch", batch)
        rng = np.random.default_rng(0)
        graph = extracted.graph
        given = []
        for tensor in (graph.tensors[i] for i in graph.inputs):
            shape = (rows, *sample_shape(tensor.shape, graph.assumed_size or 1))
            whole = not tf.as_dtype(tensor.dtype).is_floating
            given.append(
                tf.cast(np.zeros(shape) if whole else rng.normal(size=shape), tensor.dtype)
            )
    if not given or len({x.shape[0] for x in given}) > 1 or not given[0].shape[0]:
        raise ConfigurationError(
            "Expected inputs of as many samples each. Received: shapes "
            f"{[tuple(x.shape) for x in given]}"
        )
    return given


def _measure(
    extracted: ExtractedModel, inputs: Sequence[tf.Tensor], repeats: int, verbose: bool
) -> list[Measured]:
    """Measures all operations, with the values that they get of these inputs."""
    graph = extracted.graph
    boundaries = stage_boundaries(graph, range(len(graph.nodes)), len(graph.nodes))
    last_reader = {tensor: boundary.index for boundary in boundaries for tensor in boundary.inputs}
    values = dict(zip(map(BoundaryTensor, graph.inputs), inputs, strict=True))
    known: dict[str, Measured] = {}
    found = []
    bar = Console(stderr=True, quiet=not verbose)
    for boundary in track(boundaries, "Measuring operations", console=bar, transient=True):
        call = extracted.calls[boundary.index]
        received = [values[tensor] for tensor in boundary.inputs]
        key = _likeness(call, boundary, received)
        if key not in known:
            known[key] = _seconds(Stage(boundary, [call]), received, repeats)
        found.append(known[key])
        run = functools.partial(StageLayer([call], boundary).call, training=True)
        outputs, _ = tf.function(run, autograph=False)(received)
        values.update(zip(boundary.outputs, outputs, strict=True))
        values = {t: x for t, x in values.items() if last_reader.get(t, -1) > boundary.index}
    return found


def _likeness(call: Call, boundary: StageBoundary, inputs: Sequence[tf.Tensor]) -> str:
    """What two operations have in common that take equally long; a name where nobody knows."""
    text = None if call.place is not None else likeness_of(call.operation, call.arguments)
    if text is None:
        return call.name
    shapes = [(str(x.shape), x.dtype.name) for x in inputs]
    sides = (boundary.input_gradients, boundary.outputs_with_gradient, boundary.outputs)
    return f"{text} {shapes} {[*map(len, sides)]}"


def _seconds(stage: Stage, inputs: Sequence[tf.Tensor], repeats: int) -> Measured:
    """Runs a stage: the medians of its seconds, without the seconds of calling it."""
    forward, backward = [], []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        outputs, _ = stage.forward(0, inputs)
        tf.test.experimental.sync_devices()
        forward.append(time.perf_counter() - start)
        if not stage.boundary.outputs_with_gradient:
            stage.clear()
            continue
        values = dict(zip(stage.boundary.outputs, outputs, strict=True))
        seeds = [
            tf.ones([len(stage.module.added_by[True])], keras.config.floatx()),
            *(tf.ones_like(values[tensor]) for tensor in stage.boundary.outputs_with_gradient),
        ]
        start = time.perf_counter()
        stage.backward(0, seeds)
        tf.test.experimental.sync_devices()
        backward.append(time.perf_counter() - start)
        stage.module.accumulator.reset()
    kept = stage.residual_bytes
    return _without_call(forward), _without_call(backward), kept


def _without_call(times: Sequence[float]) -> float:
    """The median of all but the first run, less what a call of nothing takes."""
    return max(0.0, statistics.median(times[1:]) - CALL_SECONDS) if times[1:] else 0.0


def _profile_of(call: Call, measured: Sequence[Measured]) -> NodeProfile:
    forward, backward, kept = zip(*measured, strict=True)
    return NodeProfile(call.name, forward, backward, None if None in kept else kept)
