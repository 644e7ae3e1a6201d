"""One step: a batch cut into micro-batches, what becomes of it, and logs that all ranks know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals.functional import layer_metrics
from tarantella_pp.internals.optimizers import loss_scale
from tarantella_pp.runtime.batch import Batch
from tarantella_pp.runtime.comm.process_groups import ReplicaExchange
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.compilation import BatchMetrics, Compilation
from tarantella_pp.runtime.loss import LossArguments, LossValue
from tarantella_pp.runtime.probes.stage_probe import StageProbe
from tarantella_pp.runtime.stage.stage_boundary import BoundaryTensor
from tarantella_pp.runtime.weights.rank_weights import PlacedModel
from tarantella_pp.runtime.weights.remote_variables import OF_METRICS, StepCounter, make_remote
from tarantella_pp.runtime.weights.shared_weights import broadcast_variable

_LOSS_TAG, _LOGS_TAG = 4, 5


class BatchStep:
    """The data and the results of one step on one rank."""

    def __init__(
        self,
        batch: Batch,
        probes: Mapping[int, StageProbe],
        model_inputs: Sequence[Sequence[int]],
        exchange: ReplicaExchange,
        compiled: Compilation | None = None,
        *,
        training: bool = False,
        report: Callable[[tf.Tensor], None] | None = None,
    ) -> None:
        self.training, self.predicts = training, compiled is None
        self.batch = batch
        self.sizes = batch.share.own_sizes  # of the micro-batches of this replica
        self.results: list[Sequence[tf.Tensor]] = [()] * len(self.sizes)
        self._probes = probes
        self._model_inputs = model_inputs
        self._exchange = exchange
        self._compiled = compiled
        # Only on the rank of the last stage, as all that needs them.
        self._metrics: Any = None if compiled is None else compiled.metrics
        self._loss: Any = None if compiled is None else compiled.loss
        coupled = compiled is not None and compiled.coupling is not None
        self._at_once = coupled or len(batch.share.sizes) == 1
        self._by_parts = compiled is not None and compiled.why_whole(batch) is None
        # What the loss is multiplied with before gradients are taken.
        optimizer = compiled.update.optimizer if compiled is not None and training else None
        self._scale = loss_scale(optimizer)
        self._keeps_outputs = self._metrics is None or not self._by_parts
        self._dtype = keras.config.floatx()
        self._pieces = {
            i: [x] if len(self.sizes) == 1 else list(tf.split(x, self.sizes))
            for i, x in batch.inputs.items()
        }
        self._losses: list[LossValue] = []
        self.added = tf.zeros((), self._dtype) if compiled is None else compiled.penalty()
        self._report = report
        self._targets: list[list[tf.Tensor] | None] | None = None
        self._coefficients: list[list[tf.Tensor]] | None = None
        self._gradients: Mapping[BoundaryTensor, list[tf.Tensor]] | None = None

    def begin(self) -> None:
        """Has metrics that add up count from zero on all replicas but the first."""
        # Each replica counts from zero and the first goes on: their sum is the state after all.
        if self._by_parts and self._metrics is not None:
            self._exchange.begin_metrics(self._metrics.variables)

    def data(self, stage: int, micro_batch: int) -> Sequence[tf.Tensor]:
        """The model inputs of a stage."""
        return [self._pieces[i][micro_batch] for i in self._model_inputs[stage]]

    def share(self, micro_batch: int) -> float:
        """The share of a micro-batch in the batch."""
        return self.sizes[micro_batch] / self.batch.rows

    def add(self, stage: int, micro_batch: int, losses: tf.Tensor) -> None:
        """Takes the losses that a stage's layers add for a micro-batch."""
        if not self.batch.share.is_spare:
            factors = self._probes[stage].factors(self.training, self.share(micro_batch))
            self.added += tf.reduce_sum(losses * factors)

    def added_factors(self, stage: int, micro_batch: int) -> tf.Tensor:
        """The gradient of the loss of the batch by each added loss, scaled like the loss."""
        factors = self._probes[stage].factors(self.training, self.share(micro_batch))
        return factors if self._scale is None else factors * self._scale

    def finish(self, micro_batch: int, results: Sequence[tf.Tensor]) -> None:
        """Takes the model's outputs, on the rank of the last stage."""
        self.results[micro_batch] = results
        if self._metrics is None:
            return
        if self._by_parts and not self.batch.share.is_spare:
            self._metrics.update(self._targets_of(micro_batch), results, self.batch.signature)
        if not (self.training or self._at_once):
            self._take_loss(micro_batch)

    def forwards_done(self) -> None:
        """Reports what this rank adds to the loss, while it goes on with the backward passes."""
        if self._report is not None:
            self._report(self.added)

    def reduce(self, stage: int, bucket: int) -> None:
        """Starts to add up the gradients of a bucket over the replicas."""
        # Before that it is not known which weights have gradients.
        if self._compiled is not None and self._compiled.reach_known:
            self._compiled.update.reduce(stage, bucket, not self.batch.share.is_spare)

    def loss_gradients(self, micro_batch: int) -> Mapping[BoundaryTensor, tf.Tensor]:
        """Gradient of the loss of the batch with respect to the model's outputs."""
        if self._at_once:
            if self._gradients is None:
                gradients = self._take_loss(None)
                self._gradients = {port: self._split_whole(g) for port, g in gradients.items()}
            return {port: pieces[micro_batch] for port, pieces in self._gradients.items()}
        return self._take_loss(micro_batch)

    def _take_loss(self, micro_batch: int | None) -> Mapping[BoundaryTensor, tf.Tensor]:
        """Adds the loss of a micro-batch, or takes the whole batch's; returns its gradient."""
        batch = self.batch
        if micro_batch is None:
            outputs, rows = self.whole_results(), batch.rows
            y, weights = batch.y, batch.sample_weight
        else:
            outputs, rows = [*self.results[micro_batch]], self.sizes[micro_batch]
            if self._coefficients is None:
                found = self._loss.coefficients(batch, outputs)
                self._coefficients = [self._split_whole(coefficient) for coefficient in found]
            y, _ = self._targets_of(micro_batch)
            weights = [pieces[micro_batch] for pieces in self._coefficients]
        of_samples = micro_batch is not None
        arguments = LossArguments(of_samples, self.training, y, outputs, weights, self._scale)
        loss: LossValue = self._loss.value(arguments, (batch.signature, rows))
        self._losses.append(loss._replace(gradients={}))  # of the size of the outputs
        if not self._keeps_outputs:
            taken = range(len(self.sizes)) if micro_batch is None else [micro_batch]
            for i in taken:
                self.results[i] = ()
        return loss.gradients

    def logs(self, elsewhere: float) -> Mapping[str, Any]:
        """Loss and metrics after the step, on the rank of the last stage."""
        metrics: BatchMetrics = self._metrics
        batch = self.batch
        if not self.training and self._at_once:
            self._take_loss(None)
        if not self._by_parts:
            targets = batch.y, batch.sample_weight
            metrics.update(targets, self.whole_results(), batch.signature)
        parts = ([loss.total, *loss.each] for loss in self._losses)
        losses = [tf.add_n(summands) for summands in zip(*parts, strict=True)]
        # A replica's share counts, or of the first one the whole.
        spare = self._exchange.peers.rank > 0 if self._at_once else batch.share.is_spare
        if spare:
            losses = [tf.zeros_like(loss) for loss in losses]
        losses[0] += self.added + tf.constant(elsewhere, self._dtype)
        total, *each = self._exchange.added_up(losses)
        if self._by_parts:
            self._exchange.merge_metrics(metrics.variables)
        return metrics.logs(total, each, batch.rows)

    def whole_results(self) -> list[tf.Tensor]:
        """The model's outputs for all samples of the batch, of all replicas."""
        whole = zip(*self.results, strict=True)
        own = [parts[0] if len(parts) == 1 else tf.concat(parts, 0) for parts in whole]
        return self._exchange.joined(own, [share.counted_rows for share in self.batch.shares])

    def _targets_of(self, micro_batch: int) -> Any:
        """The targets of a micro-batch, and their weights."""
        whole = (self.batch.y, self.batch.sample_weight)
        if self._targets is None:
            self._targets = [
                None if leaf is None else self._split_whole(leaf)
                for leaf in keras.tree.flatten(whole)
            ]
        own = [None if pieces is None else pieces[micro_batch] for pieces in self._targets]
        return keras.tree.pack_sequence_as(whole, own)

    def _split_whole(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """This replica's micro-batches of what has rows for the samples of all replicas."""
        share = self.batch.share
        if share.is_spare:  # it has no samples, but runs one, for all replicas trace alike
            return [tensor[:1]]
        if len(share.sizes) == 1:
            return [tensor]
        return list(tf.split(tensor, share.sizes))[share.first : share.first + share.count]


class SharedLogs:
    """What the ranks of a pipeline know of its losses, metrics and outputs."""

    def __init__(self, model: Any, placed: PlacedModel) -> None:
        placement = placed.placement
        self._model = model
        self._ranks = placed.groups.pipeline
        self._last = placement[-1]
        self._clock = StepCounter(OF_METRICS)
        self._differ = False
        self._owners: dict[int, int] = {}
        # The variables of metrics that layers update when they are called, by rank.
        self._of_layers: dict[int, list[Any]] = {rank: [] for rank in placement}
        for call, stage in zip(placed.extracted.calls, placed.plan.assignment, strict=True):
            for variable in (v for m in layer_metrics(call.operation) for v in m.variables):
                if id(variable) not in self._owners:
                    self._owners[id(variable)] = placement[stage]
                    self._of_layers[placement[stage]].append(variable)
        # What layers have measured is known only once replicas have added it up.
        self.reports_late = bool(self._owners) and placed.groups.num_replicas > 1

    def report(self, added: tf.Tensor) -> None:
        """Tells the rank of the last stage what this one adds to loss and metrics of the batch."""
        if self._ranks.rank != self._last:
            states = [_numbers(variable.numpy()) for variable in self._of_layers[self._ranks.rank]]
            report = [float(added), states]
            self._ranks.send_json(report, [self._last], _LOSS_TAG, label="added losses")

    def share(self, step: BatchStep) -> dict[str, Any]:
        """Gives every rank the logs of a step; all must call it."""
        if self.reports_late:
            self.report(step.added)
        self.metrics_change()
        if self._ranks.rank == self._last:
            logs = {name: _plain(value) for name, value in _flatten(step.logs(self._reported()))}
            self._ranks.send_json(logs, self._ranks.others, _LOGS_TAG, label="logs")
        else:
            logs = self._ranks.receive_json(self._last, _LOGS_TAG, label="logs")
        return {
            name: value if isinstance(value, float) else np.array(value[1]).astype(value[0])
            for name, value in logs.items()
        }

    def share_outputs(self, step: BatchStep) -> list[tf.Tensor]:
        """Gives every rank the outputs of the model; all must call it."""
        if self._owners:  # layers may have updated metrics
            self.metrics_change()
        tensors = step.whole_results() if self._ranks.rank == self._last else []
        specs = [[list(tensor.shape), tensor.dtype.name] for tensor in tensors]
        received = []
        for i, (shape, dtype) in enumerate(self._ranks.broadcast_json(specs, self._last)):
            empty = np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype)
            received.append(to_buffer(tensors[i]) if tensors else empty)
            self._ranks.broadcast(received[-1], self._last)
        return tensors or list(map(to_tensor, received))

    def metrics_change(self) -> None:
        """Notes that metrics are updated, on the ranks that have them."""
        self._differ = True
        self._clock.advance()

    def share_metrics(self) -> None:
        """Gives every rank the state of all metrics, if they have changed; all must call it."""
        if not self._differ:
            return
        for variable, owner in self.metric_variables():
            broadcast_variable(variable, owner, self._ranks)
        self._differ = False

    def guard_metrics(self) -> None:
        """Has metrics refuse to be read where they are out of date."""
        for variable, owner in self.metric_variables():
            if owner != self._ranks.rank:
                make_remote(variable, self._clock)

    def metric_variables(self) -> Iterator[tuple[Any, int]]:
        """The variables of all metrics by now, each with the rank that updates it."""
        for metric in self._model.metrics:
            for variable in metric.variables:
                yield variable, self._owners.get(id(variable), self._last)

    def _reported(self) -> float:
        """Takes over metrics that other ranks have reported; returns the sum of their losses."""
        total = 0.0
        for rank in sorted(self._ranks.others):
            loss, states = self._ranks.receive_json(rank, _LOSS_TAG, label="added losses")
            total += loss
            for variable, state in zip(self._of_layers[rank], states, strict=True):
                variable.assign(np.reshape(state, variable.shape))
        return total


def _flatten(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Takes results that are dicts apart, as Keras does."""
    for name, value in sorted(logs.items()):
        if isinstance(value, Mapping):
            yield from _flatten(value)
        else:
            yield name, value


def _plain(value: Any) -> float | list[Any]:
    """A number; or an array as its dtype and its numbers."""
    # A scalar of bfloat16 is none that NumPy takes from TensorFlow.
    array = np.asarray(value.numpy() if tf.is_tensor(value) else value)
    return [array.dtype.name, _numbers(array)] if array.shape else float(array)


def _numbers(array: Any) -> Any:
    return np.asarray(array, np.float64).tolist()
