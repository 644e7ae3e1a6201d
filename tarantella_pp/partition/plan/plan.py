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
        num_stages: Number of pipeline stages.
        num_micro_batches: Number of micro-batches of a step.
        num_replicas: Number of pipelines side by side; a batch is split among them.
        batch_size: Samples of a step, over all replicas, that memory was planned for.
        schedule: Name of the schedule that memory was planned for.
        balance: What the stages are balanced by, `"memory"`, `"time"` or `"flops"`; `"given"` where
            they were given as numbers of layers.
        optimizer: The optimizer whose slots are counted.
        memory_limit: Largest memory of a stage that was allowed, in bytes, one number or one for
            each stage; `None` for any.
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
        estimated: Kinds of layers whose costs are guesses; all others follow rules or, where
            stages have seconds, measurements.
        recompute: Stages that keep the inputs of a micro-batch only and repeat its forward pass,
            ascending.
        schedule_text: Text of the schedule where its name does not say all: a user's own, or one
            that was searched for.
        ranks: Rank of each stage that the plan was made for; empty where each has its own.
        placement: Where replicas are: `"pipelines-together"` puts the ranks of a pipeline side by
            side, `"replicas-together"` the ranks of a stage.
        fusion_threshold: Most bytes of gradients that are summed over replicas at a time.
        shard_optimizer: Whether replicas share out the optimizer state (ZeRO-1); then the
            largest share is counted.
        gradient_dtype: Dtype in which gradients of weights travel between replicas, if it is
            smaller than their own; `None` for their own.
        wire_dtype: Dtype in which wider floating point activations and their gradients travel from
            stage to stage; `None` for their own. `cuts` have the sizes of the tensors themselves.
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
        """Returns the page of the plan, as a notebook shows it."""
        from tarantella_pp.partition.plan.page import as_frame, render_html

        return as_frame(render_html(self))
