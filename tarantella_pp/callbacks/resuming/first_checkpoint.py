"""A checkpoint of a model that was trained elsewhere, for `fit` to begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tarantella_pp.callbacks.resuming.checkpoint_writer import CheckpointWriter
from tarantella_pp.callbacks.resuming.run_facts import (
    as_json,
    configs_of,
    facts_of_compilation,
    facts_of_model,
    learning_rate_of,
    now,
    versions,
)
from tarantella_pp.checkpoints.manifest import (
    FORMAT,
    DataPosition,
    Manifest,
    SavedFile,
    SavedTensor,
)


def write_first(model: Any, directory: Path, epoch: int, with_optimizer: bool) -> Path:
    """Writes a checkpoint from which `fit` goes on with an epoch; takes all ranks.

    What it is compared with is the model, and what that was compiled with; the data are not known.
    """
    engine, configs = model._engine, configs_of(model)
    facts = facts_of_model(model, configs)
    own = model._state_share().owned()
    step = 0
    if with_optimizer:
        facts |= facts_of_compilation(model, configs)
        step = int(model.optimizer.iterations)
    else:
        own = {key: value for key, value in own.items() if key.startswith("model/")}
        configs |= {"optimizer": None, "compiled": None}

    def describe(files: tuple[SavedFile, ...], tensors: dict[str, SavedTensor]) -> Manifest:
        return Manifest(
            format=FORMAT,
            step=step,
            epoch=epoch,
            epoch_step=0,
            initial_epoch=epoch,
            learning_rate=learning_rate_of(model) if with_optimizer else None,
            position=DataPosition("", 0, 0, 0, False),
            tensors=tensors,
            files=files,
            facts=as_json(facts),
            history={},
            logs={},
            callbacks=[],
            shapes={},
            plan=json.loads(model.plan.to_json()),
            **configs,
            versions=versions(),
            written=now(),
        )

    writer = CheckpointWriter(engine.communicator, directory, 1, sorted(engine.stages))
    return writer.write(step, own, describe, ())
