"""One rank's part of training: its stages, its messages and its share of every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.extraction import ExtractedModel
from tarantella_pp.partition.plan_parts import OutputUse
from tarantella_pp.runtime.communicator import Communicator
from tarantella_pp.runtime.engine_options import EngineOptions
from tarantella_pp.runtime.exchange import Exchange
from tarantella_pp.runtime.execution import Execution
from tarantella_pp.runtime.feed import Batch, Feed
from tarantella_pp.runtime.interrupts import interrupts_put_off
from tarantella_pp.runtime.keras_training import build_metrics
from tarantella_pp.runtime.layer_metrics import LayerMetrics
from tarantella_pp.runtime.layout import links_of, stage_layouts
from tarantella_pp.runtime.logits import find_activations
from tarantella_pp.runtime.loss import BatchLoss
from tarantella_pp.runtime.loss_probe import whole_batch_reason
from tarantella_pp.runtime.news import News
from tarantella_pp.runtime.outputs import pack_outputs, unpacked
from tarantella_pp.runtime.owners import Owners
from tarantella_pp.runtime.programs import Programs, runs_all_forwards_first
from tarantella_pp.runtime.reach import find_reach
from tarantella_pp.runtime.recorded_execution import RecordedExecution
from tarantella_pp.runtime.recording import (
    LOGS,
    SUMS,
    TIES,
    UPDATE,
    Recorder,
    StepRecord,
    Unrecorded,
)
from tarantella_pp.runtime.rehearsal import Rehearsal
from tarantella_pp.runtime.scoring import Scoring
from tarantella_pp.runtime.stage import Stage
from tarantella_pp.runtime.stage_probe import Pieces
from tarantella_pp.runtime.step import BatchStep, micro_batch_sizes
from tarantella_pp.runtime.structure import rebuild, tensors_in
from tarantella_pp.runtime.tied_weights import TiedWeights, weights_of_several_ranks
from tarantella_pp.runtime.tuning import Tuning
from tarantella_pp.runtime.update import Update
from tarantella_pp.schedule import SEARCHED, Schedule, ScheduleSpec


class Engine:
    """Trains, tests and predicts on one rank of a pipeline.

    Args:
        model: The Keras model of the user's side: compiled loss, metrics and optimizer.
        extracted: The model's graph and calls.
        assignment: Stage of each node.
        num_micro_batches: Wanted number of micro-batches of a batch.
        spec: Which schedule it runs, and on which rank each stage is.
        communicator: The ranks of the pipeline.
        options: What else the user chose.

    Attributes:
        spec: The schedule by now; a schedule that is searched for changes.
        owners: The ranks of the model's variables.
        fallbacks: Stages of any rank that could not be cut in three, and why, once trained.
        has_run: Whether stages have been traced, with their layers as they were.
    """

    def __init__(
        self,
        model: Any,
        extracted: ExtractedModel,
        assignment: Sequence[int],
        num_micro_batches: int,
        spec: ScheduleSpec,
        communicator: Communicator,
        options: EngineOptions,
    ) -> None:
        self._model = model
        self._extracted = extracted
        self._communicator = communicator
        self._num_micro_batches = num_micro_batches
        self.spec = spec
        self._options = options
        self._layouts = stage_layouts(
            extracted.graph, assignment, spec.num_stages, find_activations(extracted)
        )
        self.placement = spec.placement
        self.scorer = self.placement[-1]
        places = {tensor: i for i, tensor in enumerate(extracted.graph.inputs)}
        self._data = [[places[p.tensor] for p in layout.data] for layout in self._layouts]
        self.stages = {
            layout.index: Stage(
                layout,
                [extracted.calls[node] for node in layout.nodes],
                recompute=layout.index in options.recompute,
                micro_batches=num_micro_batches,
            )
            for layout in self._layouts
            if self.placement[layout.index] == communicator.rank
        }
        links = links_of(self._layouts)
        self._exchange = Exchange(
            communicator, extracted.graph, links, self.placement, wire_dtype=options.wire_dtype
        )
        self._execution = Execution(self.stages, self._exchange)
        self._rehearsal = Rehearsal(
            self._layouts, self.stages, self._exchange, self.placement, communicator
        )
        self._rehearsed: set[tuple[bool, bool]] = set()
        self.owners = Owners(extracted, assignment, self.placement, communicator.rank)
        tied = weights_of_several_ranks(extracted, self.owners)
        self._ties = TiedWeights(tied, communicator)
        self._programs = Programs(self.placement, links)
        self._tuning: Tuning | None = None
        if spec.name == SEARCHED and spec.custom is None:
            limit = options.in_flight_limit or (num_micro_batches,) * spec.num_stages
            self._tuning = Tuning(spec, num_micro_batches, limit, communicator)
        self.record(None)
        self._news = News(communicator, self.scorer)
        self._layer_metrics = LayerMetrics(extracted, assignment, self.placement)
        self._metrics_differ = False
        self._scoring: Scoring | None = None
        self._loss: BatchLoss | None = None
        self._coupling: str | None = None
        self._update: Update | None = None
        self._reach_known = False
        self._has_loss = False
        self._outputs_for: dict[bytes, str | None] = {}
        self._exchanges = False
        self.fallbacks: dict[int, str] = {}
        self.has_run = False

    def feed(self, standardize: Callable[[Any], list[tf.Tensor]]) -> Feed:
        """Makes the feed that hands every rank its part of each batch.

        Args:
            standardize: Makes the flat list of model inputs of what the data set gives for `x`.
        """
        needs: list[set[int]] = [set() for _ in range(self._communicator.size)]
        for stage, places in enumerate(self._data):
            needs[self.placement[stage]].update(places)
        return Feed(self._communicator, [sorted(n) for n in needs], self.scorer, standardize)

    def train(self, batch: Batch) -> dict[str, Any]:
        """Runs one training step; returns Keras' logs, the same on all ranks."""
        with self._whole_or_nothing():
            self._rehearse(batch, training=True)
            with self._recorder.step():
                logs = self._train(batch)
        if self._tuning is not None and isinstance(self._recorder, Recorder):
            self._learn(self._tuning, self._recorder.last)
        return logs

    def _train(self, batch: Batch) -> dict[str, Any]:
        update = self._prepare(batch)
        pieces = self._pieces(batch)
        spec = self._training_spec(len(pieces.sizes))
        schedule = self._programs.training(spec, len(pieces.sizes))
        step = BatchStep(
            batch, pieces, self._data, self._scoring, self._loss, training=True,
            coupled=self._coupling is not None, by_parts=self._metrics_by_parts(batch),
            penalty=update.penalty(), report=self._report,
            update=update.ahead if self._reach_known else None,
        )  # fmt: skip
        self._recorder.runs(schedule, batch.rows)
        self._run(schedule, step)
        self._require_loss(update, training=True)
        if not self._reach_known:
            self._find_reach()
            self._find_fallbacks()
        if update.multiplies:
            with self._recorder.span(SUMS):
                update.finish_sums()
        with self._exchange_of_ties():
            gradients = update.gather()
        with self._recorder.span(UPDATE):
            update.apply(gradients)
        with self._recorder.span(LOGS):
            logs = self._logs("train", step)
        with self._exchange_of_ties():
            self._ties.refresh()
        return logs

    def test(self, batch: Batch) -> dict[str, Any]:
        """Runs one evaluation step; returns Keras' logs, the same on all ranks."""
        with self._whole_or_nothing():
            self._rehearse(batch, training=False)
            update = self._prepare(batch)
            pieces = self._pieces(batch)
            step = BatchStep(
                batch, pieces, self._data, self._scoring, self._loss, training=False,
                coupled=self._coupling is not None, by_parts=self._metrics_by_parts(batch),
                penalty=update.penalty(), report=self._report,
            )  # fmt: skip
            self._run(self._programs.inference(len(pieces.sizes)), step)
            self._require_loss(update, training=False)
            return self._logs("test", step)

    def predict(self, batch: Batch) -> Any:
        """Runs one prediction step; returns the model's outputs, on all ranks."""
        pieces = self._pieces(batch)
        step = BatchStep(batch, pieces, self._data, None, None, training=False)
        with self._whole_or_nothing():
            self._rehearse(batch, training=False)
            self._metrics_differ |= self._layer_metrics.exist
            self._run(self._programs.inference(len(pieces.sizes)), step)
            parts = zip(*step.results, strict=True) if self._news.is_source else ()
            results = self._news.share_tensors([tf.concat(part, 0) for part in parts])
        values = dict(zip(self._layouts[-1].results, results, strict=True))
        return pack_outputs(self._extracted, values, self._layouts[-1].activations)

    @property
    def sees_batch_at_once(self) -> bool:
        """Whether all outputs of a batch are there before the schedule asks for the loss."""
        schedule = self._programs.training(self.spec, self._num_micro_batches)
        return runs_all_forwards_first(schedule, len(self._layouts) - 1)

    def share_metrics(self) -> None:
        """Gives every rank the state of all metrics, if they have changed; all must call it."""
        if not self._metrics_differ:
            return
        for metric in self._model.metrics:
            for variable in metric.variables:
                owner = self._layer_metrics.owner(variable)
                self._news.share_variable(variable, self.scorer if owner is None else owner)
        self._metrics_differ = False

    def forget_compilation(self) -> None:
        """Makes the next step look at the model's loss, metrics and optimizer anew."""
        self._scoring = None
        self._loss = None
        self._update = None
        self._reach_known = False
        self._has_loss = False
        self._outputs_for.clear()
        self._news.forget_names()

    def record(self, recorder: Recorder | None) -> None:
        """Makes training steps tell when they do what.

        Args:
            recorder: Where it is noted; `None` to take no more notes.
        """
        self._asked = recorder
        if recorder is None and self._tuning is not None:
            recorder = Recorder(1)
        if recorder is None:
            self._recorder = Unrecorded()
            self._training = self._execution
        else:
            self._recorder = recorder
            self._training = RecordedExecution(self.stages, self._exchange, recorder)

    def _learn(self, tuning: Tuning, step: StepRecord) -> None:
        """Goes on with the schedule that the steps so far lead to, once there are enough."""
        found = tuning.learn(step)
        if found is not None:
            self.spec = found
            self._tuning = None
            self.record(self._asked)

    def _rehearse(self, batch: Batch, training: bool) -> None:
        """Tries the stages out before the first step of a kind.

        An error in it, which is the same on all ranks, leaves them able to go on.
        """
        pieces = self._pieces(batch)
        kind = (training, len(pieces.sizes) > 1)
        if kind in self._rehearsed or (pieces.is_plain and len(pieces.sizes) == 1):
            return
        self._exchanges = self.has_run = True
        step = BatchStep(batch, pieces, self._data, None, None, training=training)
        error = self._rehearsal.run(step)
        self._exchanges = False
        if error is not None:
            raise error
        self._rehearsed.add(kind)

    def _run(self, schedule: Schedule, step: BatchStep) -> None:
        self.has_run = True
        program = schedule.actions[self._communicator.rank]
        execution = self._training if step.training else self._execution
        self._exchanges = True
        execution.run(program, dict(enumerate(step.pieces.sizes)), step)

    def _require_loss(self, update: Update, training: bool) -> None:
        """Refuses, as Keras does, a step of which nothing is the loss."""
        if self._model.loss is not None or self._has_loss:
            return
        added = any(stage.body.added_by[training] for stage in self.stages.values())
        if not any(self._communicator.allgather_json(added or update.penalizes)):
            raise ConfigurationError(
                "No loss to compute. Provide a `loss` argument in `compile()`, or layers that add "
                "losses. Received: loss=None"
            )
        self._has_loss = True

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Leaves nothing behind of a step that an error ends.

        One process goes on from there. Several ranks do not: what the others sent meanwhile, and
        whether they have updated their weights, is not known.
        """
        self._exchanges = False
        alone = self._communicator.size == 1
        try:
            with interrupts_put_off() if alone else contextlib.nullcontext():
                yield
        except BaseException as error:
            for execution in (self._execution, self._training):
                execution.clear()
            for stage in self.stages.values():
                stage.clear()
            if self._update is not None:
                self._update.clear(error)
            if self._scoring is not None:
                self._scoring.metrics.clear()
            if self._exchanges:
                self._communicator.breaks(error)
            raise

    def _exchange_of_ties(self) -> contextlib.AbstractContextManager[None]:
        return self._recorder.span(TIES) if self._ties.exist else contextlib.nullcontext()

    def _logs(self, kind: str, step: BatchStep) -> dict[str, Any]:
        logs: Mapping[str, Any] = {}
        if self._news.is_source:
            losses, metrics = self._news.reports(self._layer_metrics.size)
            self._layer_metrics.take(metrics)
            logs = step.logs(losses)
        self._metrics_differ = True
        return self._news.share_logs(kind, logs)

    def _report(self, added: tf.Tensor) -> None:
        rank = self._communicator.rank
        self._news.report(added, self._layer_metrics.state(rank))

    def _find_reach(self) -> None:
        scored = self._loss.reached if self._loss is not None else ()
        find_reach(self._layouts, self.stages, self.placement, self._communicator, scored)
        self._reach_known = True

    def _find_fallbacks(self) -> None:
        """Learns on every rank which stages could not be cut."""
        mine = {str(i): stage.fallback for i, stage in self.stages.items() if stage.fallback}
        for theirs in self._communicator.allgather_json(mine):
            self.fallbacks.update({int(i): reason for i, reason in theirs.items()})

    def _pieces(self, batch: Batch) -> Pieces:
        sizes = micro_batch_sizes(batch.rows, self._num_micro_batches)
        return Pieces(sizes, self._communicator.size == 1 and len(self._layouts) == 1)

    def _prepare(self, batch: Batch) -> Update:
        """Builds metrics on every rank alike, loss and optimizer where they are needed."""
        if self._update is None:
            y, weight = (_symbolic(description) for description in batch.targets)
            build_metrics(self._model, y, unpacked(self._extracted.outputs_struct), weight)
            self._coupling = whole_batch_reason(self._model._compile_loss, self._extracted, y)
            bodies = {i: stage.body for i, stage in self.stages.items()}
            if self._news.is_source:
                layout = self._layouts[-1]
                self._scoring = Scoring(self._model, self._extracted, layout)
                self._loss = BatchLoss(self._model, self._extracted, layout)
            weights = self._model.trainable_variables
            optimizer = self._model.optimizer
            self._update = Update(optimizer, bodies, weights, self.owners, self._ties)
        return self._update

    def output_use(self, batch: Batch) -> OutputUse:
        """What loss and metrics need of the model's outputs; all ranks must call it.

        Args:
            batch: A batch with its targets.
        """
        self._prepare(batch)
        metrics = self._model._compile_metrics is not None
        self._metrics_by_parts(batch)
        return OutputUse(self._coupling, self._outputs_for[batch.signature], metrics)

    @property
    def is_compiled(self) -> bool:
        """Whether the model has a loss and metrics to train with."""
        return bool(self._model.compiled)

    def expected_output_use(self) -> OutputUse:
        """What loss and metrics need of the outputs as far as it is known before the first batch.

        Metrics are expected not to need those of the whole batch, as hardly any does.
        """
        reason = whole_batch_reason(self._model._compile_loss, self._extracted)
        return OutputUse(reason, None, self._model._compile_metrics is not None)

    def held(self, outputs: OutputUse) -> tuple[int, ...] | None:
        """How many micro-batches each stage holds, if another schedule runs than the plan's.

        Args:
            outputs: What loss and metrics need of the model's outputs.
        """
        if outputs.loss_at_once is None or not self._options.free_schedule:
            return None
        spec = ScheduleSpec("gpipe", len(self._layouts), self._communicator.size)
        return spec.in_flight(self._num_micro_batches)

    def _metrics_by_parts(self, batch: Batch) -> bool:
        """Whether metrics are updated with each micro-batch, which all ranks learn."""
        if batch.signature not in self._outputs_for:
            reason = None if self._scoring is None else self._scoring.why_whole(batch)
            reason = self._communicator.broadcast_json(reason, self.scorer)
            self._outputs_for[batch.signature] = reason
        return self._outputs_for[batch.signature] is None

    def _training_spec(self, count: int) -> ScheduleSpec:
        """What a training step of so many micro-batches runs."""
        spec = self.spec if self._tuning is None else self._tuning.spec
        if self._coupling is None or count == 1 or not self._options.free_schedule:
            return spec
        return ScheduleSpec("gpipe", len(self._layouts), self._communicator.size)


def _symbolic(description: Any) -> Any:
    leaves = [keras.KerasTensor(shape, dtype) for shape, dtype in tensors_in(description)]
    return rebuild(description, leaves)
