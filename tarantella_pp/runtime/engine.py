"""One rank's part of training: its stages, its messages and its share of every step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.keras_internals.training import (
    compiled_loss,
    compiled_metrics,
    standardize_inputs,
)
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.gradient_buckets import Buckets, gradient_buckets
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.planned_schedule import with_findings
from tarantella_pp.runtime.batch.batch import Batch, Need
from tarantella_pp.runtime.batch.batch_step import BatchStep
from tarantella_pp.runtime.batch.data_feed import DataFeed
from tarantella_pp.runtime.compilation import Compilation
from tarantella_pp.runtime.executor import Executor
from tarantella_pp.runtime.interrupts import interrupts_put_off
from tarantella_pp.runtime.modules.model_outputs import find_activations, pack_outputs
from tarantella_pp.runtime.modules.stage_boundary import (
    StageBoundary,
    stage_boundaries,
    stage_edges,
)
from tarantella_pp.runtime.one_rank import on_all_ranks
from tarantella_pp.runtime.optimizer_step import Bucket
from tarantella_pp.runtime.plan_watch import PlanWatch
from tarantella_pp.runtime.probes.stage_probe import Pieces
from tarantella_pp.runtime.rehearsal import Rehearsal
from tarantella_pp.runtime.replicas.batch_share import BatchShare, batch_shares
from tarantella_pp.runtime.replicas.forward_state import ForwardState
from tarantella_pp.runtime.replicas.owned_values import OwnedValues
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.replicas.replica_check import check_all_replicas
from tarantella_pp.runtime.replicas.replica_exchange import ReplicaExchange
from tarantella_pp.runtime.shared_logs import SharedLogs
from tarantella_pp.runtime.stage.gradient_reachability import find_connected_gradients
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage_messages import StageMessages
from tarantella_pp.runtime.state.owners import Owners
from tarantella_pp.runtime.state.remote_variables import (
    Clock,
    only_traced,
)
from tarantella_pp.runtime.state.tied_weights import TiedWeights, weights_of_several_ranks
from tarantella_pp.runtime.state.trainers import Trainers
from tarantella_pp.runtime.step_schedules import StepSchedules
from tarantella_pp.runtime.tracing.recorder import (
    LOGS,
    REDUCTIONS,
    SUMS,
    TIES,
    UPDATE,
    Recorder,
)
from tarantella_pp.schedule import Schedule


class Engine:
    """Trains, tests and predicts on one rank of a pipeline.

    Args:
        model: The Keras model of the user's side: compiled loss, metrics and optimizer.
        extracted: The model's graph and calls.
        plan: Which stage runs which node, and with which schedule.
        groups: The ranks of the job: of this rank's pipeline, and of the replicas.
        free_schedule: Whether another schedule may run where the loss needs the whole batch.
        wire_dtype: The type in which floating point numbers cross from rank to rank; `None` for
            their own.
        clock: Counts the training steps of the model. Default: one that begins.
        check_every: After how many steps weights are compared between replicas; `None` for never.

    Attributes:
        communicator: All ranks of the job.
        schedules: What steps run.
        watch: The plan for the batches that are trained.
        placement: Rank of each stage.
        stages: This rank's stages, by their numbers.
        owners: The ranks of the model's variables.
        trainers: The ranks that update its weights.
        feed: Hands every rank its part of each batch.
        shared_logs: What its ranks know of losses and metrics.
        logs: Keras' logs after the last step, the same on all ranks; empty once metrics are reset.
        fallbacks: Stages of any rank that could not be cut in three, and why, once trained.
        has_run: Whether stages have been traced, with their layers as they were.
        before_training: Called once, when the metrics of the next training step have variables.
    """

    def __init__(
        self,
        model: Any,
        extracted: ExtractedModel,
        plan: Plan,
        groups: ProcessGroups,
        *,
        free_schedule: bool = False,
        wire_dtype: str | None = None,
        clock: Clock | None = None,
        check_every: int | None = None,
    ) -> None:
        self.extracted = extracted
        self.groups = groups
        self.communicator = groups.world
        communicator = groups.pipeline
        self._wire_dtype = wire_dtype
        self.clock = clock or Clock()
        self.placement = plan.schedule_spec(communicator.size).placement
        self.logs: dict[str, Any] = {}
        self.fallbacks: dict[int, str] = {}
        self.has_run = False
        self.before_training: Callable[[], None] | None = None
        self._model = model
        self._plan = plan
        graph, rank = extracted.graph, communicator.rank
        self._boundaries = stage_boundaries(
            graph, plan.assignment, plan.num_stages, find_activations(extracted)
        )
        self._data = _places_of_data(self._boundaries, graph)
        # One process stands for all replicas: it runs their micro-batches one after the other.
        self._micro_batches = plan.num_micro_batches * plan.num_replicas // groups.num_replicas
        self.feed = DataFeed(
            groups.world,
            _needs(self._data, self.placement, groups),
            functools.partial(standardize_inputs, model),
            self._shares,
        )
        self.stages = {
            boundary.index: Stage(
                boundary,
                [extracted.calls[node] for node in boundary.nodes],
                recompute=boundary.index in plan.recompute,
                micro_batches=self._micro_batches,
                num_replicas=groups.num_replicas,
            )
            for boundary in self._boundaries
            if self.placement[boundary.index] == rank
        }
        links = stage_edges(self._boundaries)
        self._buckets: Sequence[Buckets] = ()
        if groups.num_replicas > 1:
            self._buckets = gradient_buckets(
                graph, plan.assignment, plan.num_stages, plan.fusion_threshold
            )
        counts = [len(buckets) for buckets in self._buckets]
        self.schedules = StepSchedules(
            plan, self._micro_batches, links, counts, groups, free_schedule
        )
        self.watch = PlanWatch(plan, extracted, self.schedules)
        exchange = StageMessages(communicator, graph, links, self.placement, wire_dtype=wire_dtype)
        self._execution = Executor(self.stages, exchange, Recorder(1))
        calls = zip(extracted.calls, plan.assignment, strict=True)
        self._forward_state = ForwardState(
            [call for call, stage in calls if self.placement[stage] == rank],
            [stage.module.statistics for stage in self.stages.values()],
            groups.peers,
        )
        self._rehearsal = Rehearsal(
            self._boundaries, self.stages, exchange, self.placement, groups, self._forward_state
        )
        self._rehearsed: set[tuple[bool, bool]] = set()
        self.owners = Owners(extracted, plan.assignment, self.placement, rank)
        self._check_every = check_every
        self._sharded = plan.shard_optimizer and groups.num_replicas > 1
        self.trainers = Trainers(self.owners, extracted.variables, groups, self._sharded)
        self._updated = self._updated_by_replicas()
        self._ties = TiedWeights(weights_of_several_ranks(extracted, self.owners), communicator)
        self.shared_logs = SharedLogs(
            model, extracted, plan.assignment, self.placement, communicator
        )
        self._replica_exchange = ReplicaExchange(groups.peers)
        self._compilation: Compilation | None = None
        self._exchanges = False

    @property
    def plan(self) -> Plan:
        """The plan in force, with what is known by now of the schedule and of the stages."""
        if self._model.compiled:
            has_metrics = compiled_metrics(self._model) is not None
            self.watch.expect(compiled_loss(self._model), has_metrics)
        plan = self.watch.in_force or self._plan
        return with_findings(plan, self.schedules.spec, self.fallbacks)

    @property
    def prints(self) -> bool:
        """Whether this rank shows progress and writes files: the last one."""
        return self.communicator.rank == self.communicator.size - 1

    def train(self, batch: Batch) -> dict[str, Any]:
        """Trains one batch; returns Keras' logs, the same on all ranks.

        Args:
            batch: This rank's part of it.

        Raises:
            PlanError: On all ranks, if a stage would need more memory than it may have.
        """
        compiled = self._compiled_for(batch)
        self.watch.require(batch.rows, compiled.outputs(batch))
        recorder, update = self._execution.recorder, compiled.update
        with self._whole_or_nothing():
            self._rehearse(batch, training=True)
            self._compile_ahead(batch, compiled, training=True)
        prepare, self.before_training = self.before_training, None
        if prepare is not None:
            prepare()
        self.clock.advance()
        with self._whole_or_nothing(), recorder.step():
            step = self._step(batch, compiled, training=True)
            schedule = self.schedules.training(
                len(step.pieces.sizes), needs_whole_batch=compiled.coupling is not None
            )
            recorder.runs(schedule, batch.rows)
            self._run(schedule, batch, step, compiled)
            self._check_losses(compiled, training=True)
            if not compiled.reach_known:
                self._find_reach(compiled)
                self._find_fallbacks()
            if update.has_deferred_matmuls:
                with recorder.span(SUMS):
                    update.finish_deferred_matmuls()
            with self._exchange_of_ties():
                gradients = update.gather(counts=not batch.share.is_spare)
            with self._exchange_of_gradients():
                sums = update.finish_reductions()
            with recorder.span(UPDATE):
                update.apply(gradients, sums)
            with recorder.span(LOGS):
                self.logs = self.shared_logs.share("train", step)
            with self._exchange_of_ties():
                self._ties.refresh()
        self.schedules.learn(recorder.last)
        if self._check_every is not None and self.clock.steps % self._check_every == 0:
            position = self.groups.pipeline.rank
            own = [v for v in self.extracted.variables if position in self.owners.ranks(v)]
            check_all_replicas(own, self.groups)
        return self.logs

    def test(self, batch: Batch) -> dict[str, Any]:
        """Evaluates one batch; returns Keras' logs, the same on all ranks."""
        with self._whole_or_nothing():
            self._rehearse(batch, training=False)
            compiled = self._compiled_for(batch)
            self._compile_ahead(batch, compiled, training=False)
            step = self._step(batch, compiled, training=False)
            schedule = self.schedules.inference(len(step.pieces.sizes))
            self._run(schedule, batch, step, compiled)
            self._check_losses(compiled, training=False)
            self.logs = self.shared_logs.share("test", step)
        return self.logs

    def predict(self, batch: Batch) -> Any:
        """Predicts one batch; returns the model's outputs, on all ranks."""
        step = BatchStep(
            batch, self._pieces(batch), self._data, None, None,
            training=False, exchange=self._replica_exchange,
        )  # fmt: skip
        with self._whole_or_nothing():
            self._rehearse(batch, training=False)
            if self.shared_logs.of_layers.exist:
                self.shared_logs.metrics_change()
            self._run(self.schedules.inference(len(step.pieces.sizes)), batch, step)
            exchange = self.shared_logs.exchange
            results = exchange.share_tensors(step.whole_results() if exchange.is_source else ())
        values = dict(zip(self._boundaries[-1].model_outputs, results, strict=True))
        return pack_outputs(self.extracted, values, self._boundaries[-1].activations)

    def publish_weights(self) -> None:
        """Makes known to other ranks that weights have changed behind a step; all must call it."""
        self.clock.advance()
        if self._updated is not None:
            self._updated.spread()
        self._ties.publish()
        self._ties.refresh()

    def forget_compilation(self) -> None:
        """Makes the next step look at the model's loss, metrics and optimizer anew."""
        self.watch.forget()
        self._compilation = None
        self.shared_logs.exchange.forget_names()

    def up_to_date(self) -> Engine:
        """Returns this engine, or one like it if its stages have run or weights were frozen.

        As in plain Keras stages are traced with their layers as they are, so what has been frozen
        since, or changed in another way, takes effect in new ones.

        Raises:
            PlanError: If layers have come or gone since the plan was made.
        """
        pairs = zip(self.extracted.graph.weights, self.extracted.variables, strict=True)
        same = all(weight.trainable == bool(variable.trainable) for weight, variable in pairs)
        if same and not self.has_run:
            return self
        extracted = extract(self.extracted.model)
        self._plan.check(extracted.graph)
        return Engine(
            self._model, extracted, with_findings(self._plan, self.schedules.spec, {}),
            self.groups, free_schedule=self.schedules.free, wire_dtype=self._wire_dtype,
            clock=self.clock, check_every=self._check_every,
        )  # fmt: skip

    def first_shapes(self) -> dict[str, Any]:
        """What this rank's stages were compiled for first, by replica and stage."""
        return {
            f"{self.groups.replica}.{index}": stage.first_shapes
            for index, stage in self.stages.items()
        }

    def begin_with(self, shapes: Mapping[str, Any]) -> None:
        """Compiles this rank's stages as they were in a run that goes on here.

        Args:
            shapes: What `first_shapes` returned on all ranks of a job with the same plan.
        """
        for index, stage in self.stages.items():
            known = shapes.get(f"{self.groups.replica}.{index}")
            if known:
                stage.begin_with(known)

    def record(self, recorder: Recorder | None) -> None:
        """Makes training steps tell when they do what.

        Args:
            recorder: Where it is noted; `None` to keep no more than the last step.
        """
        self._execution.recorder = recorder or Recorder(1)

    def _rehearse(self, batch: Batch, training: bool) -> None:
        """Tries the stages out before the first step of a kind.

        An error in it, which is the same on all ranks, leaves them able to go on.
        """
        pieces = self._pieces(batch)
        kind = (training, pieces.total > 1)
        if kind in self._rehearsed or (pieces.is_plain and pieces.total == 1):
            return
        self._exchanges = self.has_run = True
        step = BatchStep(batch, pieces, self._data, None, None, training=training)
        error = self._rehearsal.run(step)
        self._exchanges = False
        if error is not None:
            raise error
        self._rehearsed.add(kind)

    def _compile_ahead(self, batch: Batch, compiled: Compilation, training: bool) -> None:
        """Compiles the loss, and later the stages, before the first step with batches of a kind.

        An error in it is one of all ranks, and leaves them able to go on.
        """
        kind = (training, batch.signature, batch.rows)
        if kind in compiled.tried or self.communicator.size == 1:
            return
        step = self._step(batch, compiled, training=training)
        is_first = all(before != training for before, _, _ in compiled.tried)

        def compile_step() -> None:
            if not is_first:  # else they have been rehearsed just now
                self._rehearsal.compile(step)
            step.compile_loss()

        on_all_ranks(self.communicator, "compile the step", compile_step)
        compiled.tried.add(kind)

    def _run(
        self, schedule: Schedule, batch: Batch, step: BatchStep, compiled: Compilation | None = None
    ) -> None:
        """Runs this rank's actions; from now on an error may leave others with half a step."""
        self.has_run = self._exchanges = True
        merged: Sequence[Any] = ()
        if compiled is not None and compiled.loss_and_metrics and compiled.why_whole(batch) is None:
            merged = compiled.loss_and_metrics.metrics.variables
        self._replica_exchange.begin_metrics(merged)
        self._forward_state.begin(batch.share, step.training)
        self._execution.run(schedule.actions[self.groups.pipeline.rank], step.rows, step)
        self._forward_state.end(batch.shares, step.training)
        if compiled is not None and self._reports_late:
            self.shared_logs.report(step.added)

    def _step(self, batch: Batch, compiled: Compilation, *, training: bool) -> BatchStep:
        """A step with loss and metrics."""
        update = compiled.update
        ahead = update.apply_early if training and compiled.reach_known else None
        return BatchStep(
            batch, self._pieces(batch), self._data,
            compiled.loss_and_metrics, compiled.loss, training,
            coupled=compiled.coupling is not None,
            by_parts=compiled.why_whole(batch) is None,
            scale=update.loss_scale() if training else None,
            penalty=update.regularization_loss()
            if self._sharded or self.groups.replica == 0
            else None,
            report=None if self._reports_late else self.shared_logs.report,
            update=ahead, exchange=self._replica_exchange,
            reduce=functools.partial(update.reduce, counts=not batch.share.is_spare)
            if compiled.reach_known  # and with it which weights have gradients
            else None,
            progress=update.progress,
        )  # fmt: skip

    def _shares(self, rows: int) -> list[BatchShare]:
        return batch_shares(rows, self._micro_batches, self.groups.num_replicas)

    def _pieces(self, batch: Batch) -> Pieces:
        is_plain = self.communicator.size == 1 and len(self._boundaries) == 1
        return Pieces(batch.share.own_sizes, is_plain, len(batch.share.sizes))

    def _check_losses(self, compiled: Compilation, training: bool) -> None:
        """Refuses, as Keras does, a step without a loss, and what cannot be added to its loss."""
        known = self._model.loss is not None and not compiled.loss_per_sample
        if known or training in compiled.losses_checked:
            return
        added = any(stage.module.added_by[training] for stage in self.stages.values())
        added = any(self.groups.pipeline.allgather_json(added or compiled.update.penalizes))
        if self._model.loss is None and not added:
            raise ConfigurationError(
                "No loss to compute. Provide a `loss` argument in `compile()`, or layers that add "
                "losses. Received: loss=None"
            )
        if compiled.loss_per_sample and added:
            raise ConfigurationError(
                "The compiled loss has a value for each sample instead of one for the batch, and "
                "regularizers or losses that layers add are one for the batch: Keras does not add "
                "them up either. Use reduction='sum_over_batch_size' or 'sum'. "
                "Received: a loss with reduction=None"
            )
        compiled.losses_checked.add(training)

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Leaves nothing behind of a step that an error ends.

        One process goes on from there. Several ranks do not: what the others sent meanwhile, and
        whether they have updated their weights, is not known.
        """
        self._exchanges = False
        alone = self.communicator.size == 1
        try:
            with interrupts_put_off() if alone else contextlib.nullcontext():
                yield
        except BaseException as error:
            self._execution.clear()
            for stage in self.stages.values():
                stage.clear()
            if self._compilation is not None:
                self._compilation.clear(error)
            if self._exchanges:
                self.communicator.breaks(error)
            raise

    def _exchange_of_ties(self) -> contextlib.AbstractContextManager[None]:
        if not self._ties.exist:
            return contextlib.nullcontext()
        return self._execution.recorder.span(TIES)

    def _exchange_of_gradients(self) -> contextlib.AbstractContextManager[None]:
        if self.groups.num_replicas == 1:
            return contextlib.nullcontext()
        return self._execution.recorder.span(REDUCTIONS)

    def _updated_by_replicas(self) -> OwnedValues | None:
        """The weights of this rank, if replicas update them for each other."""
        if not self._sharded:
            return None
        own = [w for w in self._model.trainable_variables if self.owners.is_own(w)]
        return OwnedValues(self.groups.peers, own, [self.trainers.replica(w) for w in own])

    def _own_buckets(self) -> dict[Bucket, list[Any]]:
        """The weights that this rank reduces together, by stage and number."""
        return {
            (stage, number): [self.extracted.variables[i] for i in bucket]
            for stage, buckets in enumerate(self._buckets)
            if stage in self.stages
            for number, bucket in enumerate(buckets)
        }

    @property
    def _reports_late(self) -> bool:
        """Whether what layers have measured is known only once replicas have added it up."""
        return self.shared_logs.of_layers.exist and self.groups.num_replicas > 1

    def _find_reach(self, compiled: Compilation) -> None:
        scored = compiled.loss.reached if compiled.loss is not None else ()
        find_connected_gradients(
            self._boundaries, self.stages, self.placement, self.groups.pipeline, scored
        )
        compiled.reach_known = True

    def _find_fallbacks(self) -> None:
        """Learns on every rank which stages could not be cut."""
        mine = {str(i): stage.fallback for i, stage in self.stages.items() if stage.fallback}
        for theirs in self.groups.pipeline.allgather_json(mine):
            self.fallbacks.update({int(i): reason for i, reason in theirs.items()})

    def _compiled_for(self, batch: Batch) -> Compilation:
        """Loss, metrics and optimizer, which the first batch after `compile` tells the rest of."""
        if self._compilation is None:
            with only_traced():
                self._compilation = Compilation(
                    self._model, self.extracted, batch,
                    boundary=self._boundaries[-1], last_rank=self.placement[-1],
                    modules={i: stage.module for i, stage in self.stages.items()},
                    owners=self.trainers, ties=self._ties, groups=self.groups,
                    buckets=self._own_buckets(), updated=self._updated,
                    gradient_dtype=self._plan.gradient_dtype,
                )  # fmt: skip
            self.shared_logs.guard_metrics()
        return self._compilation


def _places_of_data(boundaries: Sequence[StageBoundary], graph: LayerGraph) -> list[list[int]]:
    """For each stage, the positions of the model inputs that it uses."""
    places = {tensor: i for i, tensor in enumerate(graph.inputs)}
    return [[places[port.tensor] for port in boundary.model_inputs] for boundary in boundaries]


def _needs(
    data: Sequence[Sequence[int]], placement: Sequence[int], groups: ProcessGroups
) -> list[Need]:
    """What each rank of the job gets of each batch."""
    used: list[set[int]] = [set() for _ in range(groups.pipeline.size)]
    for rank, places in zip(placement, data, strict=True):
        used[rank].update(places)
    needs = {
        rank: Need(tuple(sorted(used[position])), replica, targets=position == placement[-1])
        for replica, ranks in enumerate(groups.world_ranks)
        for position, rank in enumerate(ranks)
    }
    return [needs[rank] for rank in sorted(needs)]
