"""Reads plans of either kind: of a Keras model, or of an external graph."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tarantella_pp.cli.io.output import existing_file
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.external.external_plan import ExternalPlan
from tarantella_pp.partition.graph.json_record import read
from tarantella_pp.partition.plan.plan import Plan

AnyPlan: TypeAlias = Plan | ExternalPlan


class _Kind(msgspec.Struct):
    """The field that tells the kinds apart."""

    format: str = ""


def load_plan(path: str) -> AnyPlan:
    """Reads a plan."""
    file = existing_file(path)
    try:
        text = read(file, "plan")
        return (ExternalPlan if _is_of_graph(text) else Plan).from_json(text)
    except PlanError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def load_model_plan(path: str, purpose: str) -> Plan:
    """Reads the plan of a Keras model."""
    plan = load_plan(path)
    if not isinstance(plan, Plan):
        raise ConfigurationError(
            f"{path}: this is the plan of an external graph; {purpose} needs that of a Keras model."
        )
    return plan


def _is_of_graph(text: bytes) -> bool:
    """Whether a file says that it is the plan of an external graph."""
    try:
        return msgspec.json.decode(text, type=_Kind).format == "tarantella_pp.graph_plan"
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
