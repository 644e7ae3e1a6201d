"""The shape that `PipelineModel` chooses by itself, against all others, measured in `fit`.

    tarantella -n 2 --threads 1 -- benchmarks/training/choice.py
    tarantella -n 4 --threads 1 -- benchmarks/training/choice.py --models mlp cnn --rounds 4
    tarantella -n 2 --threads 1 -- benchmarks/training/choice.py --micro-batches 1 2 4 8 16

All pairs of stages x replicas for the ranks of this launch train the same batches through `fit`, in
one launch and in turn. The last rows are of a model for which a rank may take only half of what the
whole needs. "Slower" says how much longer a step takes than the fastest of those given by hand.
With `--micro-batches` each rank has one stage, and the chosen number of micro-batches is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from typing import Any

import keras
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.sized_models import BUILDERS, ROWS, data_for
from benchmarks.training.fit import BATCHES, Fit
from tarantella_pp.errors import PlanError
from tarantella_pp.runtime.comm.communicator import world

LIMITED = "mlp, half of the memory"


def planned(name: str, rows: int, balance: str | None, **shape: int) -> tnt.PipelineModel:
    """A pipeline of some shape, or of the one that the library chooses."""
    build = BUILDERS["mlp" if name == LIMITED else name]
    limits: dict[str, Any] = {}
    if name == LIMITED:
        whole = tnt.make_plan(build(), 1, batch_size=rows, balance="memory")
        limits["memory_limit"] = sum(stage.memory_bytes for stage in whole.stages) * 6 // 10
    return tnt.PipelineModel(build(), batch_size=rows, balance=balance, **shape, **limits)


def alternatives(micro_batches: list[int]) -> dict[str, dict[str, int]]:
    """What is compared, and options of it, those of the chosen one first."""
    size = world().size
    if micro_batches:
        given = {f"m = {m}": {"num_stages": size, "num_micro_batches": m} for m in micro_batches}
        return {"chosen": {"num_stages": size}, **given}
    counts = [n for n in range(1, size + 1) if size % n == 0]
    shapes = {f"{n} x {size // n}": {"num_stages": n, "num_replicas": size // n} for n in counts}
    return {"chosen": {}, **shapes}


def compare(
    name: str, rounds: int, balance: str | None, micro_batches: list[int]
) -> list[list[str]]:
    """Trains all in turn; returns table rows."""
    ranks = world()
    kind = "mlp" if name == LIMITED else name
    rows = 8 * ROWS[kind]
    x, y = data_for(kind, rows * BATCHES)
    models = {}
    for what, options in alternatives(micro_batches).items():
        with contextlib.suppress(PlanError):
            models[what] = planned(name, rows, balance, **options)
    fits = {what: Fit(model, ["accuracy"]) for what, model in models.items()}
    for turn in range(rounds + 1):
        for each in fits.values():
            ranks.barrier()
            each.run(x, y, rows, counts=turn > 0)
    medians = {what: statistics.median(each.seconds) for what, each in fits.items()}
    fastest = min(seconds for what, seconds in medians.items() if what != "chosen")
    found = []
    for what, seconds in medians.items():
        plan = models[what].plan
        shape = f"{plan.num_stages} x {plan.num_replicas}, m = {plan.num_micro_batches}"
        slower = f"{100 * (seconds / fastest - 1):+.1f} %"
        planned_ms = "" if plan.step_seconds is None else f"{1e3 * plan.step_seconds:.0f}"
        found.append([name, what, shape, plan.schedule, f"{1e3 * seconds:.0f}", planned_ms, slower])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*BUILDERS, LIMITED]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[])
    parser.add_argument("--balance", choices=("time", "flops", "memory"))
    args = parser.parse_args()
    table = Table(title=f"Stages x replicas on {world().size} ranks")
    for head in ("model", "shape", "of it", "schedule", "step ms", "planned ms", "slower"):
        table.add_column(head, justify="right" if head[-2:] in ("ms", "er") else "left")
    for name in args.models:
        for row in compare(name, args.rounds, args.balance, args.micro_batches):
            table.add_row(*row)
        keras.utils.clear_session(free_memory=True)
    if tnt.is_master_rank():
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
