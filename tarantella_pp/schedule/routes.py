"""Which stages exchange messages with which."""

from __future__ import annotations

from collections.abc import Iterable

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Compute, Link


def check_links(
    num_stages: int, links: Iterable[Link] | None, gradient_links: Iterable[Link] | None
) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Returns links and gradient links, checked, sorted and each once, with their defaults."""
    if links is None:
        links = [(stage, stage + 1) for stage in range(num_stages - 1)]
    forward = tuple(sorted(set(links)))
    for source, target in forward:
        if not 0 <= source < target < num_stages:
            raise ScheduleError(
                f"Expected links from a stage to a later one, of stages 0 to {num_stages - 1}. "
                f"Received: links with {source}>{target}"
            )
    backward = forward if gradient_links is None else tuple(sorted(set(gradient_links)))
    for source, target in backward:
        if (source, target) not in forward:
            raise ScheduleError(
                "Expected gradients to flow over links that carry activations. Received: "
                f"gradient_links with {source}>{target}, links={forward}"
            )
    return forward, backward


class Routes:
    """The messages that a computation needs and makes."""

    def __init__(
        self, num_stages: int, links: Iterable[Link], gradient_links: Iterable[Link]
    ) -> None:
        self._inputs: dict[str, list[list[Link]]] = {
            kind: [[] for _ in range(num_stages)] for kind in "FB"
        }
        self._outputs: dict[str, list[list[Link]]] = {
            kind: [[] for _ in range(num_stages)] for kind in "FB"
        }
        for source, target in links:
            self._inputs["F"][target].append((source, target))
            self._outputs["F"][source].append((source, target))
        for source, target in reversed(list(gradient_links)):
            self._inputs["B"][source].append((target, source))
            self._outputs["B"][target].append((target, source))

    def inputs(self, action: Compute) -> list[Link]:
        """Returns the pairs (sending stage, receiving stage) whose messages `action` needs."""
        return [] if action.kind == "W" else self._inputs[action.kind[0]][action.stage]

    def outputs(self, action: Compute) -> list[Link]:
        """Returns the pairs (sending stage, receiving stage) whose messages `action` makes."""
        return [] if action.kind == "W" else self._outputs[action.kind[0]][action.stage]
