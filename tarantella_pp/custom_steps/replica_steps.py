"""Replicas of a model that trains, tests or predicts in steps of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.custom_steps.prepared_step import PreparedStep
from tarantella_pp.custom_steps.step_probe import StepKinds, found_kinds
from tarantella_pp.custom_steps.step_trace import StepTrace
from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.state import trained_by
from tarantella_pp.internals.training import batch_norms, moments_known, warn_of_statistics
from tarantella_pp.runtime.batch import (
    READER,
    ArrayRows,
    Batch,
    Need,
    batch_shares,
    describe,
    rebuild,
)
from tarantella_pp.runtime.comm.collective import on_all_ranks, on_one_rank
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import value_of
from tarantella_pp.runtime.data_feed import DataFeed, dense
from tarantella_pp.runtime.stage.forward_state import BatchStatistics
from tarantella_pp.runtime.weights import shared_weights
from tarantella_pp.runtime.weights.remote_variables import StepCounter


class StepFeed(DataFeed):
    """Hands every rank its samples of all that a batch has: a step gets what Keras gives."""

    def _opened(self, data: Any) -> tuple[list[tf.Tensor], list[tf.Tensor], tuple[Any, Any]]:
        structure, leaves = describe(data)
        tensors = [tf.convert_to_tensor(dense(leaf, "data")) for leaf in leaves]
        self._check_rows(tensors)
        return tensors, [], (structure, None)

    def _own_parts(
        self, arrays: ArrayRows, own: Any, order: Any
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return describe(arrays.whole(own))[1], []


class ReplicaSteps:
    """Runs the steps of a model on all ranks; each has the whole model."""

    plan, stages = None, ()

    def __init__(self, model: Any, ranks: Communicator, gradient_dtype: str | None) -> None:
        self.communicator = ranks
        self.logs: dict[str, Any] = {}  # Keras' logs after the last step
        # Called once, when all variables of the next training step are there.
        self.before_training: Callable[[], object] | None = None
        needs = [Need(None, replica) for replica in range(ranks.size)]
        self.feed = StepFeed(ranks, needs, list, lambda rows: batch_shares(rows, 1, ranks.size))
        self._model = model
        self._gradient_dtype = gradient_dtype
        self._steps: dict[tuple[str, bytes], PreparedStep] = {}
        self._alike: dict[int, Any] = {}

    def train(self, batch: Batch) -> Any:
        """Trains one batch; returns Keras' logs, the same on all ranks."""
        self.logs = self._run("train_step", batch)
        return self.logs

    def test(self, batch: Batch) -> Any:
        """Evaluates one batch; returns Keras' logs, the same on all ranks."""
        return self._run("test_step", batch)

    def predict(self, batch: Batch) -> Any:
        """Predicts one batch; returns the outputs for all of it, on all ranks."""
        return self._run("predict_step", batch)

    def share_metrics(self) -> None:
        """Does nothing: metrics are the same on all ranks after each step."""

    def record(self, recorder: Any) -> None:
        """Refuses to record; `None` is what it does anyway."""
        if recorder is not None:
            raise ConfigurationError(
                f"Model '{self._model.name}' runs steps of its own, which have no stages that a "
                "Timeline could show. Leave the Timeline, or `--trace`, out."
            )

    def forget_compilation(self) -> None:
        """Makes the next steps be traced and tried anew."""
        self._steps.clear()

    @property
    def weights(self) -> ReplicaState:
        """The state of training, as far as it is there."""
        return ReplicaState(self._model, self._steps, self.communicator.rank)

    def check_alike(self) -> None:
        """Compares what replicas hold, which each trains itself; all of them must call it."""
        shared_weights.check_alike(list(self._alike.values()), self.communicator)

    def check_written(self, told: Any = None) -> list[Any]:
        """Returns what all ranks tell: none has a weight that another one trains."""
        return self.communicator.allgather_json(told)

    def _run(self, name: str, batch: Batch) -> Any:
        key = name, batch.signature
        if key not in self._steps:
            self._steps[key] = self._prepared(name, batch)
        step = self._steps[key]
        if name == "train_step":
            prepare, self.before_training = self.before_training, None
            if prepare is not None:
                prepare()
        try:
            return step.predict(batch) if name == "predict_step" else step.run(batch)
        except BaseException as error:
            step.clear()
            self.communicator.breaks(error)
            raise

    def _prepared(self, name: str, batch: Batch) -> PreparedStep:
        """Traces a step and tries it out, before the first batch of a kind; takes all ranks."""
        ranks, what = self.communicator, f"{type(self._model).__name__}.{name}"
        statistics = BatchStatistics(self._model)

        def traced() -> tuple[StepTrace, StepTrace]:
            self._check_norms(name == "train_step" and ranks.prints and not self._steps)
            run = self._trace(name, batch, lambda: statistics.gathered(self._model))
            if not statistics.variables:
                return run, run
            return run, self._trace(name, batch, lambda: moments_known(self._model))

        run, tried = on_all_ranks(ranks, f"trace {what}", traced)
        self._make_alike(run, statistics)
        if (late := tried.read_late([update.place for update in tried.updates])) is not None:
            raise UnsupportedModelError(
                f"{what} reads '{late.path}' in the forward pass that has just changed it, but "
                "replicas bring it up to date only where weights are updated. Read it before its "
                "layer is called or after the update, or train in one process."
            )
        found = on_one_rank(
            ranks, READER, f"try {what}",  # which has the first samples of each batch
            lambda: found_kinds(tried, [*batch.inputs.values()], by_rows=name == "predict_step"),
        )  # fmt: skip
        kinds = StepKinds(*found)
        statistics.waits = tried.read_late() is None
        return PreparedStep(run, tried.written, kinds, statistics, ranks, self._gradient_dtype)

    def _trace(self, name: str, batch: Batch, around: Any) -> StepTrace:
        """Traces a step; once more if that has made variables, which are there then."""
        specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in batch.inputs.values()]

        makes = False

        def step(*tensors: tf.Tensor) -> Any:
            nonlocal makes
            before = self._count()
            results = getattr(self._model, name)(rebuild(batch.targets[0], tensors))
            makes = self._count() != before  # the last time: TensorFlow may itself have run it anew
            return results

        what = f"{type(self._model).__name__}.{name}"
        try:
            found = StepTrace(step, specs, what, around)
            return StepTrace(step, specs, what, around) if makes else found
        except Exception as error:
            error.add_note(
                f"{what} is traced for any number of samples, as Keras' `fit` does of arrays: ask "
                "for it with keras.ops.shape(x)[0]."
            )
            raise

    def _count(self) -> tuple[int, ...]:
        optimizer = getattr(self._model, "optimizer", None)
        slots = 0 if optimizer is None else len(optimizer.variables)
        return slots, len(self._model.variables)

    def _check_norms(self, warns: bool) -> None:
        """Warns of batch statistics; refuses those that replicas would share in plain Keras."""
        norms = [layer for layer in batch_norms(self._model) if layer.trainable]
        if warns:
            warn_of_statistics(norms, f"{self.communicator.size} replicas' samples")
        if names := [layer.name for layer in norms if layer.synchronized]:
            raise UnsupportedModelError(
                f"BatchNormalization layers {', '.join(names)} have synchronized=True, but each of "
                f"{self.communicator.size} replicas takes its own statistics. Use "
                "synchronized=False, or train in one process."
            )

    def _make_alike(self, trace: StepTrace, statistics: BatchStatistics) -> None:
        """Gives all ranks the first one's weights, slots and seeds, unless they have them."""
        own = {id(v) for v in statistics.variables}
        held = [v.value for v in self._model.variables]
        held += [v.value for update in trace.updates for v in update.optimizer.variables]
        held += [v for v in trace.variables if id(v) not in own]
        new = {id(v): v for v in held if id(v) not in self._alike}
        mine = [trace.digest(), *(f"{v.dtype.name}{[*v.shape]}" for v in new.values())]
        for rank, theirs in enumerate(self.communicator.allgather_json(mine)):
            if theirs != mine:
                what = "variables" if theirs[1:] != mine[1:] else "operations or constants"
                raise ConfigurationError(
                    "All ranks must run the same step of the same model, in which nothing follows "
                    "from the rank or from random numbers of Python or NumPy. Received: other "
                    f"{what} on rank {rank} than on rank {self.communicator.rank}"
                )
        for variable in new.values():
            shared_weights.broadcast_variable(variable, 0, self.communicator)
        self._alike |= new


class ReplicaState:
    """The state of training, for checkpoints: all ranks have all of it, and the first one writes.

    `optimizer/0.3` is the fourth variable of the first optimizer among the model's attributes,
    `trained/0` has the numbers of the weights that it was built for.
    """

    def __init__(self, model: Any, steps: Mapping[Any, PreparedStep], rank: int) -> None:
        self.clock = StepCounter()  # nothing is trained by another rank alone
        self._model = model
        self._steps = steps
        self._rank = rank
        self._count = len(self.variables)

    @property
    def variables(self) -> list[Any]:
        """The model's, without variables of metrics."""
        of_metrics = {id(variable) for variable in self._of_metrics().values()}
        return [variable for variable in self._model.variables if id(variable) not in of_metrics]

    def owned(self) -> dict[str, Any]:
        """What this rank writes."""
        found = self.needed() | self.metrics()
        numbers = {id(variable): i for i, variable in enumerate(self.variables)}
        for n, optimizer in enumerate(self._optimizers()):
            trained = [numbers[id(variable)] for variable in trained_by(optimizer)]
            found[f"trained/{n}"] = np.array(trained, np.int64)
        return {} if self._rank else found  # all ranks have looked for what gets lost

    def gather(self) -> None:
        """Does nothing: all ranks have all weights."""

    refresh = gather

    def reader(self, stream: shared_weights.ValueStream) -> Callable[[Any], Any]:
        """Reads a weight, which is there."""
        return value_of

    def build(self, trained: Mapping[str, Any]) -> None:
        """Gives optimizers the slots that they had."""
        variables = self.variables
        for n, optimizer in enumerate(self._optimizers()):
            if not optimizer.built and len(numbers := trained.get(str(n), ())):
                optimizer.build([variables[number] for number in numbers])

    def needed(self) -> dict[str, Any]:
        """What this rank must read, but for metrics."""
        pairs = enumerate(self._optimizers())
        slots = {f"optimizer/{n}.{i}": v for n, o in pairs for i, v in enumerate(o.variables)}
        return {f"model/{i}": v for i, v in enumerate(self.variables)} | slots

    def metrics(self) -> dict[str, Any]:
        """The variables of metrics, once it is known that steps change nothing that gets lost."""
        found, optimizers = self._of_metrics(), self._optimizers()
        kept = {id(v.value) for v in (self.needed() | found).values()}
        lost = [variable.path for variable in self.variables[self._count :]]
        for (name, _), step in self._steps.items():
            if name != "predict_step":
                lost += [v.name for v in step.changes if id(v) not in kept]
                lost += [each.name for each in step.optimizers if each not in optimizers]
        if lost:
            raise UnsupportedModelError(
                f"A Checkpoint keeps what the model '{self._model.name}' and the optimizers among "
                f"its attributes have before `fit`. Received: {', '.join(lost)}. Make variables "
                "with add_weight, a keras.random.SeedGenerator an attribute, and weights at once: "
                "tnt.Model(model, inputs=keras.Input(...))."
            )
        return found

    def _of_metrics(self) -> dict[str, Any]:
        pairs = enumerate(self._model.metrics)
        return {f"metric/{n}.{i}": v for n, m in pairs for i, v in enumerate(m.variables)}

    def _optimizers(self) -> list[Any]:
        values = vars(self._model).values()
        leaves = [v for value in values for v in (value if isinstance(value, list) else [value])]
        found = [leaf for leaf in leaves if isinstance(leaf, keras.optimizers.Optimizer)]
        return list(dict.fromkeys(found))
