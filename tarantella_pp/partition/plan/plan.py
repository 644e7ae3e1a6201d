"""The plan: which stage runs which operation, and what that costs; goes to JSON and back."""

from __future__ import annotations

from typing import Any

from tarantella_pp.partition.plan.plan_data import PlanData


class Plan(PlanData, frozen=True):
    """Which stage runs which operation of a model, and what that costs.

    `print(plan)` shows a table. `make_plan` makes one; `save` and `load` keep it as JSON.

    Attributes:
        version: Version of the format.
        model: Name of the model.
        balance: What the stages are balanced by; `"given"` where they were given as numbers of
            layers. It is an option of `make_plan`, as are `num_stages`, `num_micro_batches`,
            `num_replicas`, `batch_size`, `schedule` and others that stand here as they were chosen.
        optimizer: The optimizer whose slots are counted.
        fingerprint: Fingerprint of the model's layer graph.
        node_names: Name of each node of that graph.
        assignment: Stage of each node.
        stages: The stages.
        cuts: The tensors that are sent between them.
        ties: The variables that several of them use.
        certificate: How good the plan is known to be.
        bubble: Share of a pipeline's step that ranks wait, simulated on `machine`; `None` where
            that was not simulated.
        assumed_size: Size that unknown dimensions other than the batch were counted with.
        kept_whole: Layers that would have been opened for a better balance and cannot be, and why.
        estimated: Kinds of layers whose costs are guesses; all others are counted or, where
            stages have seconds, measured.
        schedule_text: Text of the schedule where its name does not say all: a user's own, or one
            that was searched for.
        in_bubbles: Stage and micro-batch of each forward pass that runs again before its gradient
            is there, while its rank would wait.
        ranks: Rank of each stage that the plan was made for; empty where each has its own.
        fallbacks: The stages whose backward pass the runtime could not cut in two, and why; known
            once they have trained.
        outputs: What loss and metrics of a compiled model need of its outputs, which the memory of
            the last stage counts; `None` where that was not known.
        machine: The ranks and links that a step is simulated with; `None` in files from before
            plans had it, whose bubble is one of messages that take no time.
        step_seconds: Simulated seconds of a step, sums over replicas included; `None` where that
            was not simulated.
        next_best, advice, measured, except_last: In files of before; nothing is made of them.
        work: Arithmetic and memory traffic of each node, from which its seconds on any machine
            follow; empty in files from before plans had it.
    """

    def __str__(self) -> str:
        """Returns the table of the plan, as wide as the terminal, without colours."""
        # Displays are imported when they are asked for: ranks load plans, and never print them.
        from tarantella_pp.partition.plan.report import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        """Returns the table of the plan for `rich.print`."""
        from tarantella_pp.partition.plan.report import table

        return table(self)

    def _repr_html_(self) -> str:
        from tarantella_pp.partition.plan.page import as_frame, render_html

        return as_frame(render_html(self))
