"""Plans for ranks with several stages."""

import keras
import pytest

from tarantella_pp import make_plan
from tarantella_pp.partition.best_stages import rank_totals
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec

pytestmark = pytest.mark.keras


@pytest.fixture(scope="module")
def made():
    """Makes plans of layers of some widths, unless told otherwise of some that grow wider."""

    def make(widths=(64, 64, 64, 64, 64, 192), **options):
        x = inputs = keras.Input((widths[0],))
        for width in widths:
            x = keras.layers.Dense(width)(x)
        model = keras.Model(inputs, x, name="widening")
        given = {"num_stages": 4, "num_micro_batches": 4, "balance": "flops", **options}
        given.setdefault("machine", HardwareSpec(6e10, action_seconds=3e-4))
        return make_plan(model, given.pop("num_stages"), **given)

    return make


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("interleaved", (0, 1, 0, 1)), ("zb-v", (0, 1, 1, 0))]
)
@pytest.mark.parametrize("balance", ["flops", "memory"])
def test_the_largest_rank_is_what_counts(made, schedule, ranks, balance):
    plan = made(schedule=schedule, balance=balance)
    assert plan.ranks == ranks
    stages = [s.flops if balance == "flops" else s.lasting_bytes for s in plan.stages]
    totals = rank_totals(stages, ranks)
    assert max(totals) == plan.certificate.value
    assert sum(totals) / 2 >= plan.certificate.lower_bound or balance == "memory"
    assert plan.certificate.lower_bound <= plan.certificate.value


def test_a_limit_of_stages_holds(made):
    free = made(schedule="zb-v")
    limit = max(stage.memory_bytes for stage in free.stages)
    plan = made(schedule="zb-v", memory_limit=limit)
    assert plan.assignment == free.assignment
    less = made(schedule="zb-v", memory_limit=limit - 1, num_micro_batches=None)
    assert max(stage.memory_bytes for stage in less.stages) < limit
