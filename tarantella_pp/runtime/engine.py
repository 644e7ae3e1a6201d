"""One rank's part of training: its stages, its messages and its share of every step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tarantella_pp.errors import CommunicationError, ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.state import only_traced
from tarantella_pp.internals.training import compiled_loss, compiled_metrics, standardize_inputs
from tarantella_pp.partition.graph.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_simulation import with_findings
from tarantella_pp.runtime.batch import Batch, batch_shares, needs_of_ranks
from tarantella_pp.runtime.batch_step import BatchStep, SharedLogs
from tarantella_pp.runtime.compilation import Compilation
from tarantella_pp.runtime.data_adapter import single_batch
from tarantella_pp.runtime.data_feed import DataFeed
from tarantella_pp.runtime.executor import LOGS, REDUCTIONS, TIES, UPDATE, Recorder
from tarantella_pp.runtime.rank_stages import RankStages
from tarantella_pp.runtime.stage.graph_functions import unoptimized
from tarantella_pp.runtime.stage.model_outputs import pack_outputs
from tarantella_pp.runtime.step_schedules import MemoryCheck, StepSchedules
from tarantella_pp.runtime.weights.optimizer_probe import check_division
from tarantella_pp.runtime.weights.rank_weights import PlacedModel, RankWeights
from tarantella_pp.schedule import Schedule


class Engine:
    """Trains, tests and predicts on one rank of a pipeline."""

    def __init__(
        self,
        model: Any,
        placed: PlacedModel,
        *,
        free_schedule: bool,
        check_every: int | None,
        weights: RankWeights | None = None,
    ) -> None:
        self.extracted: ExtractedModel = placed.extracted
        self.groups = groups = placed.groups
        self.communicator = groups.world
        # Keras' logs after the last step; empty once metrics are reset.
        self.logs: dict[str, Any] = {}
        # Stages of any rank that could not be cut in three, and why, once trained.
        self.fallbacks: dict[int, str] = {}
        # Called once, when the metrics of the next training step have variables.
        self.before_training: Callable[[], object] | None = None
        self._model = model
        self.placed = placed
        self._check_every = check_every
        self.stages = RankStages(placed)
        self.weights = RankWeights(placed, model.variables, weights)
        self.schedules = StepSchedules(
            placed, self.stages.edges, self.weights.bucket_counts, free_schedule
        )
        self.memory = MemoryCheck(placed, self.schedules)
        self.feed = DataFeed(
            groups.world,
            needs_of_ranks(self.stages.model_inputs, placed.placement, groups),
            functools.partial(standardize_inputs, model),
            lambda rows: batch_shares(rows, placed.own_micro_batches, groups.num_replicas),
        )
        self.shared_logs = SharedLogs(model, placed)
        self.check_alike = self.weights.check_alike
        self.check_written = self.weights.check_written
        self.share_metrics = self.shared_logs.share_metrics
        self._compilation: Compilation | None = None
        self._exchanges = False

    @property
    def plan(self) -> Plan:
        """The plan in force, with the schedule and the stages as they are known by now."""
        plan = self.memory.largest or self.placed.plan
        if self._model.compiled and self.memory.largest is None:
            has_metrics = compiled_metrics(self._model) is not None
            plan = self.memory.expected(compiled_loss(self._model), has_metrics)
        return with_findings(plan, self.schedules.spec, self.fallbacks)

    def train(self, batch: Batch) -> dict[str, Any]:
        """Trains one batch; returns Keras' logs, the same on all ranks."""
        compiled = self._compiled_for(batch)
        self.memory.refuse_batch(batch.rows, compiled.outputs(batch))
        recorder, update = self.stages.executor.recorder, compiled.update
        with self._whole_or_nothing():
            # What can fail does so before any message of the step is under way.
            self._rehearse(batch, training=True)
            step = self._step(batch, compiled, training=True)
            schedule = self.schedules.training(len(step.sizes), compiled.coupling)
        # Taken before it runs, so that an error in it does not have it run twice.
        prepare, self.before_training = self.before_training, None
        if prepare is not None:
            prepare()
        self.weights.clock.advance()
        with self._whole_or_nothing(), recorder.step(schedule, batch.rows):
            self._run(schedule, step)
            compiled.check_losses(training=True)
            if not compiled.reach_known:  # and so no reduction has started yet
                self._learn_of_gradients(compiled)
            with self._exchange(TIES, self.weights.ties.exist):
                arrived = update.gather(counts=not batch.share.is_spare)
            with self._exchange(REDUCTIONS, self.groups.num_replicas > 1):
                reduced = update.finish_reductions()
            with recorder.span(UPDATE):
                update.apply(arrived, reduced)
            # New values of tied weights travel while the logs do.
            with recorder.span(LOGS):
                self.logs = self.shared_logs.share(step)
            with self._exchange(TIES, self.weights.ties.exist):
                self.weights.ties.copies.refresh()
        if self._check_every is not None and self.weights.clock.steps % self._check_every == 0:
            self.check_alike()
        return self.logs

    def test(self, batch: Batch) -> dict[str, Any]:
        """Evaluates one batch; returns Keras' logs, the same on all ranks."""
        with self._whole_or_nothing():
            self._rehearse(batch, training=False)
            compiled = self._compiled_for(batch)
            step = self._step(batch, compiled, training=False)
            self._run(self.schedules.inference(len(step.sizes)), step)
            compiled.check_losses(training=False)
            self.logs = self.shared_logs.share(step)
        return self.logs

    def predict(self, batch: Batch) -> Any:
        """Predicts one batch; returns the model's outputs, on all ranks."""
        step = self._step(batch, None, training=False)
        with self._whole_or_nothing():
            self._rehearse(batch, training=False)
            self._run(self.schedules.inference(len(step.sizes)), step)
            results = self.shared_logs.share_outputs(step)
        return pack_outputs(self.extracted, self.stages.boundaries[-1], results)

    def refuse_compilation(self, optimizer: Any, loss: Any, has_metrics: bool) -> None:
        """Refuses what would train otherwise on these ranks, or does not fit the plan."""
        ranks = self.weights.table.ranks.size
        check_division(optimizer, self._model.trainable_variables, ranks)
        self.memory.refuse_compilation(loss, has_metrics)

    def forget_compilation(self) -> None:
        """Makes the next step look at the model's loss, metrics and optimizer anew."""
        self.memory.largest = None
        self._compilation = None

    def up_to_date(self) -> Engine:
        """Returns this engine, or one like it if stages have run or weights were frozen since."""
        pairs = zip(self.extracted.graph.weights, self.extracted.variables, strict=True)
        same = all(weight.trainable == bool(variable.trainable) for weight, variable in pairs)
        if same and not self.stages.have_run:
            return self
        plan = self.placed.plan
        read = extract(self.extracted.model)
        extracted = read.planned_by(plan.fingerprint, plan.node_names)
        if extracted.graph.fingerprint() != plan.fingerprint:
            raise ConfigurationError(
                f"Layers of '{self._model.name}' have other weights or calls than when it was "
                "wrapped, as `enable_lora` and `quantize` make them. Do that first, and wrap the "
                "model again."
            )
        plan.check(extracted.graph)
        found = with_findings(plan, self.schedules.spec, {})
        return Engine(
            self._model, PlacedModel(extracted, found, self.groups), weights=self.weights,
            free_schedule=self.schedules.free, check_every=self._check_every,
        )  # fmt: skip

    def record(self, recorder: Recorder | None) -> None:
        """Makes training steps tell when they do what."""
        self.stages.executor.recorder = recorder or Recorder(1)

    def _rehearse(self, batch: Batch, training: bool) -> None:
        """Tries the stages out before the first step of a kind; after an error ranks can go on."""
        if not self.stages.is_due(training, batch):
            return
        self._exchanges = True
        try:
            self.stages.rehearse(self._step(batch, None, training=training))
        except Exception as error:
            self._exchanges = isinstance(error, CommunicationError)
            raise
        self._exchanges = False

    def _step(self, batch: Batch, compiled: Compilation | None, *, training: bool) -> BatchStep:
        reports = compiled is not None and not self.shared_logs.reports_late
        stages = self.stages
        return BatchStep(
            batch, stages.probes, stages.model_inputs, stages.exchange, compiled,
            training=training,
            report=self.shared_logs.report if reports else None,
        )  # fmt: skip

    def _run(self, schedule: Schedule, step: BatchStep) -> None:
        """Has this rank do its part of a schedule; from here on messages are under way."""
        self._exchanges = True
        with self.stages.begun(step) as executor:
            executor.run(schedule, step)

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Leaves nothing behind of a step that an error ends; several ranks cannot go on then."""
        self._exchanges = False
        alone = self.communicator.size == 1
        try:
            with (
                unoptimized("arithmetic_optimization"),
                unoptimized("constant_folding"),
                interrupts_put_off() if alone else contextlib.nullcontext(),
            ):
                yield
        except BaseException as error:
            self.stages.clear()
            if self._compilation is not None:
                self._compilation.update.clear(error)
            if self._exchanges:
                self.communicator.breaks(error)
            raise

    def _exchange(self, what: str, happens: bool) -> contextlib.AbstractContextManager[None]:
        return self.stages.executor.recorder.span(what) if happens else contextlib.nullcontext()

    def _learn_of_gradients(self, compiled: Compilation) -> None:
        """Learns in the first step which weights have gradients, and which stages are not cut."""
        self.stages.find_reach(compiled.loss.reached if compiled.loss is not None else ())
        if not any(self.groups.pipeline.allgather_json(compiled.update.has_gradients())):
            raise UnsupportedModelError(
                "No gradients provided for any variable. The loss does not depend on a weight of "
                f"'{self._model.name}' by operations that have gradients, unlike rounding, "
                "`argmax` and `stop_gradient`. Leave those to metrics, or freeze the model."
            )
        compiled.reach_known = True
        self.fallbacks.update(self.stages.find_fallbacks())

    def _compiled_for(self, batch: Batch) -> Compilation:
        """Loss, metrics and optimizer, which the first batch after `compile` tells the rest of."""
        if self._compilation is None:
            self.stages.forget_kept()
            with only_traced():
                self._compilation = Compilation(
                    self._model, self.placed, batch, boundary=self.stages.boundaries[-1],
                    modules=self.stages.modules, weights=self.weights,
                )  # fmt: skip
            self.shared_logs.guard_metrics()
        return self._compilation


def step_function(
    model: Any, step: Callable[[Batch], dict[str, Any]]
) -> Callable[[Iterator[Any]], dict[str, Any]]:
    """Makes a function that trains or evaluates, as Keras' loops expect it."""
    engine, at_once = model._engine, model.steps_per_execution

    def run(iterator: Iterator[Any]) -> dict[str, Any]:
        data = next(iterator)
        try:
            logs = step(_batch(engine, data))
            if not isinstance(data, Batch):  # a single batch is an epoch of its own
                engine.share_metrics()
                return logs
            for batch in itertools.islice(iterator, at_once - 1):
                logs = step(batch)
        except StopIteration as error:  # which Keras' loops take for the end of the data
            raise RuntimeError("A step raised StopIteration before it was over.") from error
        return logs

    return run


def predict_function(engine: Any) -> Callable[[Sequence[Any]], Any]:
    """Makes a function that predicts, as Keras' loops expect it."""

    def run(data: Sequence[Any]) -> Any:
        outputs = [engine.predict(_batch(engine, each)) for each in data]
        return keras.tree.map_structure(lambda *parts: keras.ops.concatenate(parts), *outputs)

    return run


def _batch(engine: Any, data: Any) -> Batch:
    """A batch of this rank, or its part of one that a method for single batches was given."""
    return data if isinstance(data, Batch) else single_batch(engine, data)


@contextlib.contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Lets Ctrl-C wait until the block has ended, as a step of plain Keras does; only the first."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed: list[types.FrameType | None] = []

    def note(number: int, frame: types.FrameType | None) -> None:
        pressed.append(frame)
        if len(pressed) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(signal.SIGINT, pressed[0])
