"""Runs one rank's list of actions; owns nothing but the loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from tarantella_pp.runtime.recorder import Recorder, Span
from tarantella_pp.runtime.stage.stage_boundary import BoundaryTensor, StageBoundary
from tarantella_pp.runtime.stage.stage_messages import StageMessages
from tarantella_pp.schedule import (
    Compute,
    Direction,
    Message,
    Reduce,
    Schedule,
    Transfer,
    kept_whole,
    send_window,
)

if TYPE_CHECKING:
    import tensorflow as tf

    from tarantella_pp.runtime.batch_step import BatchStep
    from tarantella_pp.runtime.stage.stage import Stage

Values: TypeAlias = "dict[BoundaryTensor, tf.Tensor]"


class Executor:
    """Interprets a schedule's actions on the stages of one rank.

    It notes when each begins and ends. On a GPU a computation ends when it has been handed over,
    as far as these notes can tell.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        messages: StageMessages,
        recorder: Recorder,
    ) -> None:
        self.recorder = recorder
        self._stages = stages
        self._messages = messages
        self._activations: dict[Message, Sequence[tf.Tensor]] = {}
        self._gradients: dict[Message, Sequence[tf.Tensor]] = {}
        self._awaited: dict[tuple[Direction, Message], Transfer] = {}
        self._kept_whole: frozenset[tuple[int, int]] = frozenset()

    def run(self, schedule: Schedule, step: BatchStep) -> None:
        """Runs this rank's part of one step."""
        self.clear()
        program = schedule.actions[self._messages.rank]
        window = send_window(schedule.name, schedule.num_stages, schedule.num_ranks)
        transfers = [action for action in program if isinstance(action, Transfer)]
        receives = [action for action in transfers if action.operation == "R"]
        self._messages.begin(receives, step.sizes, window)
        self._kept_whole = kept_whole(program)
        forwards_left = sum(isinstance(a, Compute) and a.kind == "F" for a in program)
        reduces = False
        for action in program:
            if reduces:  # MPI moves messages only inside its calls
                step.progress()
            if isinstance(action, Transfer):
                self._transfer(action)  # never waits: only a computation waits, for what it needs
                continue
            if isinstance(action, Reduce):
                reduces = True
                with self.recorder.span(action):
                    step.reduce(action.stage, action.bucket)
                continue
            stage = self._stages[action.stage]
            arrived = self._await_messages(stage.boundary, action)
            start = time.perf_counter()
            if action.kind == "F":
                self._forward(stage, action, arrived, step)
            elif action.kind == "W":
                with self._messages.computing():
                    stage.backward_weight(action.micro_batch)
            else:
                self._backward(stage, action, arrived, step)
            self.recorder.spans.append(Span(action, start, time.perf_counter()))
            if action.kind == "F":
                forwards_left -= 1
                if not forwards_left:
                    step.forwards_done()

    def clear(self) -> None:
        """Drops the values of a step that did not end."""
        self._activations.clear()
        self._gradients.clear()
        self._awaited.clear()

    def _transfer(self, action: Transfer) -> None:
        """Sends a message, or notes that one will come."""
        if action.operation == "R":
            self._messages.expect(action)
            self._awaited[action.direction, action.message] = action
            return
        start = time.perf_counter()
        # Popped: what was sent is the message's, and its memory is free once it has left.
        kept = self._activations if action.direction == "F" else self._gradients
        self._messages.send(action, kept.pop(action.message))
        self.recorder.spans.append(Span(action, start, time.perf_counter()))

    def _await_messages(self, boundary: StageBoundary, action: Compute) -> list[tf.Tensor]:
        """The tensors that a computation needs of other stages, once all of them are here."""
        key = action.micro_batch
        arrived: list[tf.Tensor] = []
        if action.kind == "F":
            for edge in boundary.receives:
                arrived += self._arrived("F", (edge.source, edge.target, key))
        elif action.kind != "W":
            for edge in boundary.sends:
                if edge.gradients:
                    arrived += self._arrived("B", (edge.target, edge.source, key))
        return arrived

    def _arrived(self, direction: Direction, message: Message) -> Sequence[tf.Tensor]:
        """The tensors of a message: from this rank, or from another once they are here."""
        action = self._awaited.pop((direction, message), None)
        if action is None:
            return (self._activations if direction == "F" else self._gradients).pop(message)
        start = time.perf_counter()
        arrived = self._messages.receive(action)
        self.recorder.spans.append(Span(action, start, time.perf_counter()))
        return arrived

    def _forward(
        self, stage: Stage, action: Compute, arrived: Sequence[tf.Tensor], step: BatchStep
    ) -> None:
        boundary, key = stage.boundary, action.micro_batch
        inputs = [*step.data(boundary.index, key), *arrived]
        whole = (boundary.index, key) in self._kept_whole
        with self._messages.computing():
            if step.training:
                outputs, added = stage.forward(key, inputs, step.share(key), whole=whole)
            else:
                outputs, added = stage.evaluate(inputs, step.share(key))
        values: Values = dict(zip(boundary.outputs, outputs, strict=True))
        for edge in boundary.sends:
            self._activations[edge.source, edge.target, key] = _pick(values, edge.tensors)
        if added is not None:
            step.add(boundary.index, key, added)
        if boundary.model_outputs:
            step.finish(key, _pick(values, boundary.model_outputs))

    def _backward(
        self, stage: Stage, action: Compute, arrived: Sequence[tf.Tensor], step: BatchStep
    ) -> None:
        boundary, key = stage.boundary, action.micro_batch
        sums: Values = dict(step.loss_gradients(key)) if boundary.model_outputs else {}
        tensors = [tensor for edge in boundary.sends for tensor in edge.gradients]
        # An output that several stages read gets a gradient from each of them.
        for tensor, gradient in zip(tensors, arrived, strict=True):
            sums[tensor] = sums[tensor] + gradient if tensor in sums else gradient
        seeds = [
            step.added_factors(boundary.index, key),
            *(sums[tensor] for tensor in boundary.outputs_with_gradient),
        ]
        run = stage.backward if action.kind == "BW" else stage.backward_input
        with self._messages.computing():
            results = run(key, seeds)
        gradients = dict(zip(boundary.input_gradients, results, strict=True))
        for edge in boundary.receives:
            if edge.gradients:
                message = (edge.target, edge.source, key)
                self._gradients[message] = _pick(gradients, edge.gradients)


def _pick(values: Values, tensors: Sequence[BoundaryTensor]) -> list[tf.Tensor]:
    return [values[tensor] for tensor in tensors]
