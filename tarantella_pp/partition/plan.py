"""The plan: which stage runs which operation, and what that costs; goes to JSON and back."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph import LayerGraph
from tarantella_pp.partition.plan_checks import difference, problems
from tarantella_pp.partition.plan_parts import CutEdge, Proof, StagePlan

__all__ = ["CutEdge", "Plan", "Proof", "StagePlan", "micro_batch_size"]

MAX_FILE_BYTES = 64 * 2**20


class Plan(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag="tarantella_pp.plan",
):
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
        balance: What the stages are balanced by, `"memory"`, `"time"` or `"flops"`.
        optimizer: The optimizer whose slots are counted.
        memory_limit: Largest memory of a stage that was allowed, in bytes; `None` for any.
        fingerprint: Fingerprint of the model's layer graph.
        node_names: Name of each node of that graph.
        assignment: Stage of each node.
        stages: The stages.
        cuts: The tensors that are sent between them.
        certificate: How good the plan is known to be.
        bubble: Share of a step that a rank waits, by the schedule's formula; `None` without one.
        assumed_size: Size that unknown dimensions other than the batch were counted with.
        estimated: Kinds of layers whose costs are guesses; all others follow rules or, where
            stages have seconds, measurements.
        recompute: Stages that keep the inputs of a micro-batch only and repeat its forward pass,
            ascending.
        program: Text of the schedule where its name does not say all: a user's own, or one that
            was searched for.
        fallbacks: The stages whose backward pass the runtime could not cut in two, and why; known
            once they have trained.
    """

    model: str
    num_stages: int
    num_micro_batches: int
    num_replicas: int
    batch_size: int
    schedule: str
    balance: str
    optimizer: str
    memory_limit: int | None
    fingerprint: str
    node_names: tuple[str, ...]
    assignment: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    cuts: tuple[CutEdge, ...]
    certificate: Proof
    bubble: float | None = None
    assumed_size: int | None = None
    estimated: tuple[str, ...] = ()
    recompute: tuple[int, ...] = ()
    program: str | None = None
    fallbacks: tuple[str, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        """Checks that everything fits together.

        Raises:
            PlanError: A number is out of range, not finite, or does not match the others.
        """
        for problem in problems(self):
            raise PlanError(f"This is no valid plan: {problem}")

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch on one replica, rounded up."""
        return micro_batch_size(self.batch_size, self.num_replicas, self.num_micro_batches)

    def check(self, graph: LayerGraph) -> None:
        """Checks that the plan is one of this model.

        Args:
            graph: The model's layer graph.

        Raises:
            PlanError: It is a plan of another model; the message names what differs.
        """
        if self.fingerprint != graph.fingerprint():
            raise PlanError(f"This is a plan of another model: {difference(self, graph)}")
        for before, after in graph.digraph.edges:
            if self.assignment[before] > self.assignment[after]:
                raise PlanError(
                    f"Node '{self.node_names[after]}' on stage {self.assignment[after]} needs node "
                    f"'{self.node_names[before]}', which the plan puts on the later stage "
                    f"{self.assignment[before]}."
                )

    def to_json(self) -> str:
        """Returns the plan as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads a plan from JSON text; every field is checked and unknown ones are refused.

        Args:
            text: What `to_json` gave.

        Returns:
            The plan.

        Raises:
            PlanError: The text is no valid plan.
        """
        if len(text) > MAX_FILE_BYTES:
            raise PlanError(
                f"A plan has at most {MAX_FILE_BYTES} bytes. Received: {len(text)} bytes"
            )
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            if isinstance(error.__cause__, PlanError):
                raise error.__cause__ from None
            raise PlanError(f"This is no valid plan: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a JSON file; a file that is there is replaced in one step.

        Args:
            path: Where to.
        """
        target = Path(path)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            file.write(self.to_json() + "\n")
        Path(file.name).replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a JSON file.

        Args:
            path: The file.

        Returns:
            The plan.

        Raises:
            PlanError: The file cannot be read or holds no valid plan.
        """
        try:
            with Path(path).open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise PlanError(f"Cannot read the plan '{path}': {error.strerror}") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    def __str__(self) -> str:
        """Returns the table of the plan, as wide as the terminal, without colours."""
        from tarantella_pp.partition.report import as_text  # report needs this file

        return as_text(self)

    def __rich__(self) -> Any:
        """Returns the table of the plan for `rich.print`."""
        from tarantella_pp.partition.report import table

        return table(self)


def micro_batch_size(batch_size: int, num_replicas: int, num_micro_batches: int) -> int:
    """Returns the samples of one micro-batch on one replica, rounded up.

    Args:
        batch_size: Samples of a step, over all replicas.
        num_replicas: Number of replicas.
        num_micro_batches: Micro-batches of a step.
    """
    return -(-batch_size // (num_replicas * num_micro_batches))
