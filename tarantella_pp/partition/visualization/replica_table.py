"""Which rank is what, where there are several pipelines."""

from __future__ import annotations

from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.visualization.canvas.markup import Markup, tag
from tarantella_pp.partition.visualization.html_tables import chip

MOST_REPLICAS = 64
"""Rows of the table; those of further replicas look alike."""


def replica_table(plan: Plan) -> Markup:
    """Returns the ranks of all pipelines: a row for each replica, a column for each position."""
    owners = plan.ranks or tuple(range(plan.num_stages))
    heads = [tag("th", "Replica", scope="col")]
    for position in range(plan.num_ranks):
        stages = [chip(stage) for stage, owner in enumerate(owners) if owner == position]
        heads.append(tag("th", "stages " if len(stages) > 1 else "stage ", *stages, scope="col"))
    rows = []
    for replica in range(min(plan.num_replicas, MOST_REPLICAS)):
        ranks = [plan.world_rank(replica, position) for position in range(plan.num_ranks)]
        cells = [tag("td", f"rank {rank:,}") for rank in ranks]
        rows.append(tag("tr", tag("td", f"{replica:,}"), *cells))
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
