"""Reads plans."""

from __future__ import annotations

from tarantella_pp.cli.io.output import existing_file
from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.json_record import read
from tarantella_pp.partition.plan.plan import Plan


def load_plan(path: str) -> Plan:
    """Reads a plan."""
    file = existing_file(path)
    try:
        text = read(file, "plan")
        if b'"tarantella_pp.graph_plan"' in text[:1000]:
            raise PlanError(
                "This is the plan of an external graph, as earlier versions wrote them. Write the "
                "graph as node-link JSON of networkx and make its plan again."
            )
        return Plan.from_json(text)
    except PlanError as error:
        raise ConfigurationError(f"{path}: {error}") from None
