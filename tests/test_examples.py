"""The examples: they say how to be called, and come to the same losses on all numbers of ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import resource
import signal
import sys
from pathlib import Path
from unittest import mock

import keras
import pytest

from tests.helpers.mpi import mpi_run
from tests.helpers.training import use_float64

pytestmark = pytest.mark.keras

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
SMALL = {
    "data_parallel_resnet.py": ({"filters": 4, "blocks": 1}, "--epochs 2 --warm-up 1"),
    "hybrid_gpt.py": ({"width": 16, "blocks": 1}, "--steps 6 --batch-size 8 --write 2"),
    "oversized.py": ({}, "--width 16 --blocks 1 --steps 2 --limit 20000"),
    "resume.py": ({"width": 8}, "--epochs 2 --directory {folder}"),
    "train_digits.py": ({"filters": 2, "blocks": 1}, "--epochs 1 --batch-size 359"),
}
"""Options of the model, which are those of its function, and of the command line."""


OVERSIZED = "--width 512 --blocks 4 --steps 2 --batch-size 4 --limit 600"
"""Weights, gradients and optimizer state take 404 MB in float64, TensorFlow and its graphs more."""


def loaded(name):
    spec = importlib.util.spec_from_file_location("example", FOLDER / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(name, options, arguments):
    """Runs an example as a script, with a smaller model; returns what it prints."""
    printed = io.StringIO()
    called = [name, *arguments.split()]
    with mock.patch.object(sys, "argv", called), contextlib.redirect_stdout(printed):
        module = loaded(name)
        module.build_model = functools.partial(module.build_model, **options)
        module.main()
    return printed.getvalue()


def losses(printed):
    return re.findall(r"^(?:test )?loss: .*", printed, re.MULTILINE)


def on_ranks(folder):
    use_float64()
    return {name: run_small(name, folder) for name in SMALL if name != "oversized.py"}


def run_small(name, folder, *more):
    options, arguments = SMALL[name]
    return run_example(name, options, " ".join([arguments.format(folder=folder), *more]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_says_how_to_be_called(name):
    with pytest.raises(SystemExit) as end:
        run_example(name, {}, "--help")
    assert end.value.code == 0


@pytest.mark.slow
@pytest.mark.mpi
def test_four_ranks_come_to_the_losses_of_one(float64, tmp_path):
    """Two replicas of two stages; the residual network has a batch that grows with the ranks."""
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    *others, master = mpi_run(4, on_ranks, str(shared), timeout=400).check().results
    for name in ("hybrid_gpt.py", "resume.py", "train_digits.py"):
        assert losses(master[name])
        assert losses(master[name]) == losses(run_small(name, alone))
        assert ("on 2 replicas" in master[name]) == (name in ("hybrid_gpt.py", "train_digits.py"))
    # One process goes on where four ranks have ended.
    resumed, expected = (
        losses(run_small("resume.py", folder, "--epochs", "3")) for folder in (shared, alone)
    )
    assert resumed == expected
    assert len(resumed) == 3
    before, after = map(float, re.findall(r"[\d.]+", losses(master["data_parallel_resnet.py"])[0]))
    assert after < before
    assert not any(losses(other[name]) for other in others for name in other)


@pytest.mark.slow
def test_a_model_that_fits_is_trained_by_one_process_too(float64):
    """On ranks that hold a part of it see below."""
    assert len(re.findall(r"\d\.\d{4}", *losses(run_small("oversized.py", "")))) == 3


def oversized():
    """The example, and its arguments."""
    example = loaded("oversized.py")
    with mock.patch.object(sys, "argv", ["oversized.py", *OVERSIZED.split()]):
        return example, example.parse_arguments()


def limited(folder):
    """Its losses where a process may not have more memory, and how much it has had of that."""
    use_float64()
    example, args = oversized()
    before = example.limit_memory(args.limit)
    losses = example.train(args, Path(folder))
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return losses, (limit - before) // 10**6, (example.memory() - before) // 10**6


@pytest.mark.slow
@pytest.mark.mpi
def test_four_ranks_train_what_one_process_cannot_hold(float64, tmp_path):
    """They come to the losses of one process of plain Keras that has no limit and trains on."""
    alone = mpi_run(1, limited, str(tmp_path / "alone"), timeout=120)
    assert not alone.timed_out
    assert alone.returncode != 0
    said = re.search("OOM|MemoryError|bad_alloc|allocate", alone.stderr)
    # TensorFlow crashes where it does not ask whether it got the memory.
    assert said or alone.returncode in (signal.SIGABRT, signal.SIGSEGV), alone.stderr[-2000:]

    example, args = oversized()
    x, y = example.load_data(args)
    keras.utils.set_random_seed(1)
    model = example.compiled(example.build_model(args.width, args.blocks))
    options = {"batch_size": args.batch_size, "verbose": 0}
    expected = []
    for epoch in range(2):
        model.fit(x, y, shuffle=False, initial_epoch=epoch, epochs=epoch + 1, **options)
        expected.append(model.evaluate(x, y, **options))

    run = mpi_run(4, limited, str(tmp_path), timeout=240).check()
    for (trained, read, trained_on), limit, taken in run.results:
        assert [trained, trained_on] == pytest.approx(expected, rel=1e-10, abs=0)
        assert read == pytest.approx(trained, rel=1e-13, abs=0)
        assert taken <= limit == args.limit
