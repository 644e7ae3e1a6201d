"""What stands behind a `PipelineModel`: plan, engine, feed and the state that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.feeding import BatchIterator, shared_adapters
from tarantella_pp.model_state import ModelState
from tarantella_pp.optimizer_state import OptimizerState
from tarantella_pp.partition.extraction import ExtractedModel, extract
from tarantella_pp.partition.graph import LayerGraph
from tarantella_pp.partition.plan import Plan
from tarantella_pp.partition.plan_in_force import check_limit, plan_in_force
from tarantella_pp.partition.plan_parts import OutputUse
from tarantella_pp.planned_schedule import schedule_spec, search_limits, with_findings
from tarantella_pp.runtime.communicator import Communicator
from tarantella_pp.runtime.engine import Engine
from tarantella_pp.runtime.engine_options import EngineOptions
from tarantella_pp.runtime.feed import Batch
from tarantella_pp.runtime.keras_training import get_data_adapter, standardize_inputs


class Pipeline:
    """One rank's part of a model's pipeline; not a Keras object, so Keras tracks nothing of it.

    Args:
        model: The `PipelineModel`.
        extracted: Graph and calls of the user's model.
        plan: The plan.
        communicator: The ranks of the pipeline.
        free_schedule: Whether another schedule than the plan's may run where the loss needs it.
        wire_dtype: The type in which floating point numbers travel; `None` for their own.
        state: The variables of the model, if a pipeline for it has been made before.
    """

    def __init__(
        self,
        model: Any,
        extracted: ExtractedModel,
        plan: Plan,
        communicator: Communicator,
        free_schedule: bool = False,
        wire_dtype: str | None = None,
        state: ModelState | None = None,
    ) -> None:
        self.extracted = extracted
        self.communicator = communicator
        self._plan = plan
        self._options = EngineOptions(
            free_schedule, plan.recompute, search_limits(plan), wire_dtype
        )
        self.logs: dict[str, Any] = {}
        self._in_force: Plan | None = None
        self._largest_batch = 0
        self.engine = Engine(
            model,
            extracted,
            plan.assignment,
            plan.num_micro_batches,
            schedule_spec(plan, communicator.size),
            communicator,
            self._options,
        )
        self.feed = self.engine.feed(lambda x: standardize_inputs(model, x))
        # Weights whose results are not needed are in no stage, and the same everywhere.
        variables = list({id(v): v for v in (*extracted.variables, *model.variables)}.values())
        self.state = state or ModelState(variables, self.engine.owners, communicator)

    @property
    def plan(self) -> Plan:
        """The plan in force, with what is known by now of the schedule and of the stages."""
        if self._in_force is None and self.engine.is_compiled:
            expected = self.engine.expected_output_use()
            self._in_force = self._plan_of(self._plan.batch_size, expected)
        plan = self._in_force or self._plan
        return with_findings(plan, self.engine.spec, self.engine.fallbacks)

    def _plan_of(self, batch_size: int, outputs: OutputUse) -> Plan:
        held = self.engine.held(outputs)
        return plan_in_force(self._plan, self.extracted.graph, batch_size, outputs, held)

    def train(self, batch: Batch) -> dict[str, Any]:
        """Trains one batch, if its memory is within the limit; returns the logs.

        Args:
            batch: This rank's part of it.

        Raises:
            PlanError: On all ranks, if a stage would need more than it may have.
        """
        if batch.rows > self._largest_batch:
            plan = self._plan_of(batch.rows, self.engine.output_use(batch))
            check_limit(plan, self._plan.batch_size)
            self._in_force, self._largest_batch = plan, batch.rows
        self.state.begin_step()
        return self.engine.train(batch)

    def forget_compilation(self) -> None:
        """Makes the next step look at the model's loss, metrics and optimizer anew."""
        self._in_force, self._largest_batch = None, 0
        self.engine.forget_compilation()

    def up_to_date(self, model: Any) -> Pipeline:
        """Returns this pipeline, or one like it if its stages have run or weights were frozen.

        As in plain Keras stages are traced with their layers as they are, so what has been frozen
        since, or changed in another way, takes effect in new ones.

        Args:
            model: The `PipelineModel`.

        Raises:
            PlanError: If layers have come or gone since the plan was made.
        """
        pairs = zip(self.extracted.graph.weights, self.extracted.variables, strict=True)
        same = all(weight.trainable == bool(variable.trainable) for weight, variable in pairs)
        if same and not self.engine.has_run:
            return self
        extracted = extract(self.extracted.model)
        self._plan.check(extracted.graph)
        plan = with_findings(self._plan, self.engine.spec, {})
        free, wire = self._options.free_schedule, self._options.wire_dtype
        return Pipeline(model, extracted, plan, self.communicator, free, wire, self.state)

    def divide(self, optimizer: Any, model: Any) -> OptimizerState:
        """Leaves an optimizer with this rank's share of its slots; all ranks must call it.

        Args:
            optimizer: What `compile` was given.
            model: The `PipelineModel`.
        """
        weights = model.trainable_variables
        return OptimizerState(optimizer, weights, self.engine.owners, self.communicator)

    @property
    def free_schedule(self) -> bool:
        """Whether another schedule than the plan's may run where the loss needs it."""
        return self._options.free_schedule

    @property
    def prints(self) -> bool:
        """Whether this rank shows progress: the last one, where losses are born."""
        return self.communicator.rank == self.communicator.size - 1

    def batches(self, iterator: Any) -> Iterator[Batch]:
        """This rank's batches from what Keras' loops hand to a step function."""
        if isinstance(iterator, BatchIterator):
            return iterator
        return self.feed.batches(iterator)

    def open_data(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None
    ) -> Any:
        """Opens data to evaluate or predict, on the rank that reads; returns an adapter."""

        def make() -> list[Any]:
            return [get_data_adapter(x, y, sample_weight, batch_size, steps)]

        return self.adapters(make)[0]

    def adapters(self, make: Callable[[], list[Any]]) -> list[Any]:
        """Opens data on the rank that reads; returns adapters for Keras' loops, on all ranks.

        Args:
            make: Opens it: adapters of Keras, `None` among them.
        """
        at_end = self.engine.share_metrics
        return shared_adapters(self.communicator, self.feed, make, at_end)

    def stepper(
        self, step: Callable[[Batch], dict[str, Any]], steps_per_execution: int
    ) -> Callable[[Any], dict[str, Any]]:
        """Makes a step function as Keras' loops expect it.

        Args:
            step: Runs one batch and returns logs.
            steps_per_execution: How many batches to run at a time.

        Returns:
            A function of an iterator, which raises `StopIteration` at the end of the data.
        """

        def run(iterator: Any) -> dict[str, Any]:
            batches = self.batches(iterator)
            self.logs = step(next(batches))
            for _, batch in zip(range(steps_per_execution - 1), batches, strict=False):
                self.logs = step(batch)
            if not isinstance(iterator, BatchIterator):  # a single batch is an epoch of its own
                self.engine.share_metrics()
            return self.logs

        return run

    def predict(self, data: Sequence[Any]) -> Any:
        """Runs prediction steps, as Keras' loops expect it.

        Args:
            data: Batches, or on `predict_on_batch` what the user passed.

        Returns:
            The outputs of all batches, in the structure of the model.
        """
        batches = [b if isinstance(b, Batch) else next(self.feed.batches(iter([b]))) for b in data]
        outputs = [self.engine.predict(batch) for batch in batches]
        return keras.tree.map_structure(lambda *parts: keras.ops.concatenate(parts), *outputs)

    def refuse_existing(self, path: Path, overwrite: bool) -> None:
        """Refuses, on all ranks, to replace a file that must not be replaced.

        Args:
            path: The file.
            overwrite: Whether it may be replaced.

        Raises:
            ConfigurationError: If it exists and may not be replaced.
        """
        exists = self.communicator.broadcast_json(path.exists(), self.communicator.size - 1)
        if exists and not overwrite:
            raise ConfigurationError(
                f"File '{path}' exists. Received: overwrite=False. Choose another name, or pass "
                "overwrite=True."
            )

    def on_one_rank(self, what: str, write: Callable[[], None]) -> None:
        """Lets the last rank do something alone; all ranks wait for it and learn of a failure.

        Args:
            what: Name of it, for the message.
            write: What to do.

        Raises:
            ConfigurationError: On the other ranks, if it failed.
        """
        failure: Exception | None = None
        if self.prints:
            try:
                write()
            except Exception as error:
                failure = error
        message = self.communicator.broadcast_json(
            None if failure is None else f"{type(failure).__name__}: {failure}",
            self.communicator.size - 1,
        )
        if failure is not None:
            raise failure
        if message is not None:
            raise ConfigurationError(
                f"{what} failed on rank {self.communicator.size - 1}: {message}"
            )


def agreed_plan(make: Callable[[], Plan], graph: LayerGraph, communicator: Communicator) -> Plan:
    """Makes a plan on one rank and gives it to all, whose models it must fit.

    Args:
        make: Makes or loads the plan.
        graph: The layer graph of this rank's model.
        communicator: The ranks of the pipeline.

    Returns:
        The plan, the same on every rank.

    Raises:
        PlanError: On all ranks, if the plan cannot be made, or does not fit a rank's model.
    """
    made: Plan | None = None
    failure: Exception | None = None
    if communicator.rank == 0:
        try:
            made = make()
        except Exception as error:
            failure = error
    news = [None if failure is None else str(failure), None if made is None else made.to_json()]
    message, text = communicator.broadcast_json(news)
    if failure is not None:
        raise failure
    if message is not None:
        raise PlanError(f"Rank 0 could not make the plan: {message}")
    plan = made or Plan.from_json(text or "")
    plan.check(graph)
    return plan
