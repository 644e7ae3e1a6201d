"""The largest stage of our plans, and of the rules by which other pipeline libraries cut a model.

    python benchmarks/planning/rules.py ResNet50 --stages 4 --batch-size 64 --micro-batches 16

The rules are equal numbers of layers; parameter balance, as DeepSpeed's
`partition_method="parameters"`; and cost balance, which the block partition of torchgpipe's
`balance_by_time` and `balance_by_size` comes close to. They cut the order of the graph; ours
chooses among all orders.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from tarantella_pp.cli import inputs
from tarantella_pp.partition.best_stages import state_sums, sums_of
from tarantella_pp.partition.cut import Prices, best_cut
from tarantella_pp.partition.graph.ideals import Array, Blocks
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan.hardware_spec import machine_of
from tarantella_pp.partition.planner import Planner


def even_parts(weights: Array, parts: int) -> tuple[int, ...]:
    """Returns the part of each item of a sequence whose heaviest part is as light as can be."""
    count = len(weights)
    chain = Blocks.joined(count, itertools.pairwise(range(count)))
    found = best_cut(chain, Prices(weights, np.zeros(count), np.ones(min(parts, count))))
    assert found is not None  # each part has an item
    return found.assignments[0]


def assignments(planner: Planner, options: PlanOptions) -> dict[str, tuple[int, ...]]:
    """The stage of each operation, by the rule that gives it; ours first."""
    settled = options.settled()
    costs, blocks = planner.costs(settled), planner.blocks
    prices, state = sums_of(costs, settled), state_sums(costs)
    rules = {
        "equal layers": np.ones(len(state)),
        "parameter balance": state,
        "cost balance": prices.once + prices.each,
    }
    found = {"tarantella": tuple(planner.solve(settled).assignment)}
    for name, weights in rules.items():
        items = np.bincount(blocks.owner, weights, len(blocks))
        stages = np.array(even_parts(items, settled.num_stages))
        found[name] = tuple(stages[blocks.owner].tolist())
    return found


def main() -> None:
    """Prints a table of memory and one of FLOPs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help=inputs.HELP)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batches", type=int)
    given = parser.parse_args()
    model = inputs.build_without_weights(given.model)
    planner = Planner.of(model, inputs.optimizer_of(given.model, model), machine=machine_of("core"))
    for balance in ("memory", "flops"):
        options = PlanOptions(
            num_stages=given.stages, batch_size=given.batch_size, balance=balance,
            num_micro_batches=given.micro_batches,
        )  # fmt: skip
        settled = options.settled()
        costs, ours = planner.costs(settled), None
        print(f"\n| {balance} of the largest stage | | / ours |\n| --- | --- | --- |")
        for rule, stages in assignments(planner, options).items():
            if balance == "flops":
                value = float(np.bincount(stages, costs.flops()).max())
            else:
                priced = costs.stages(stages)
                value = float(max(stage.memory_bytes for stage in priced))
            ours = ours or value
            print(f"| {rule} | {value:.6g} | {value / ours:.3f} |")


if __name__ == "__main__":
    main()
