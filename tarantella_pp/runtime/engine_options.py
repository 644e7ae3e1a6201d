"""What the user chose of how a pipeline runs, beside its stages and its schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine.

    Attributes:
        free_schedule: Whether another schedule may run where the loss needs the whole batch.
        recompute: Stages that keep the inputs of a micro-batch only.
        in_flight_limit: For a schedule that is searched for: the most micro-batches that each
            stage may hold; `None` for any number.
        wire_dtype: The type in which floating point numbers cross from rank to rank; `None` for
            their own.
    """

    free_schedule: bool = False
    recompute: tuple[int, ...] = ()
    in_flight_limit: tuple[int, ...] | None = None
    wire_dtype: str | None = None
