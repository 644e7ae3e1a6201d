"""What a traced forward pass does besides computing: variables it writes, random numbers it draws.

Micro-batches run a forward pass several times for each batch, and ranks run parts of it apart from
each other. Neither changes any number, as long as nothing but seeds of a layer's own, statistics
of batches and metrics goes from one run to the next.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tarantella_pp.errors import UNCUT, UnsupportedModelError
from tarantella_pp.internals.functional import sublayers
from tarantella_pp.internals.training import global_seed, running_states
from tarantella_pp.runtime.stage.graph_functions import frontier

_WRITES = ("Assign", "ResourceScatter", "ResourceApply", "ResourceStridedSliceAssign", "Rng")
# Operations that call functions with all inputs but the first.
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


class Effect(NamedTuple):
    """Something that an operation does to what lasts."""

    operation: str  # name of the operation
    # Name of the resource that it writes; `None` if it draws random numbers from TensorFlow's own
    # generators
    argument: str | None


def refuse_effects(function: Any, layer: Any, num_micro_batches: int, plain: bool) -> None:
    """Refuses a forward pass whose numbers follow from how often, or where, it runs."""
    refuse_kept(function, functools.partial(place_of, layer=layer))
    graph = function.graph
    handles = {internal.op.name: external for external, internal in graph.captures}
    allowed = {id(state.value.handle) for state in running_states(layer)}
    seed = global_seed()
    shared = None if seed is None else id(seed.value.handle)
    for effect in effects_of(graph.as_graph_def()):
        handle = None if effect.argument is None else id(handles.get(effect.argument))
        if handle in allowed:
            continue
        written = next((v.name for v in graph.variables if id(v.handle) == handle), "")
        place = place_of(effect.operation, layer, written)
        if handle is None or handle == shared:
            if num_micro_batches > 1 or not plain:
                raise UnsupportedModelError(
                    f"{place} draws random numbers without a generator of its own, so they would "
                    "be others for each number of stages, ranks and micro-batches. Make one in "
                    "its __init__, self.seed_generator = keras.random.SeedGenerator(seed), and "
                    "pass it on, keras.random.normal(shape, seed=self.seed_generator)."
                )
        elif num_micro_batches > 1:
            raise UnsupportedModelError(
                f"{place} writes {f'its variable {written!r}' if written else 'a variable'} each "
                f"time it runs, {num_micro_batches} times for each batch (each micro-batch of all "
                f"replicas) and not once, so it would train something else. {UNCUT}."
            )


def refuse_kept(function: Any, place: Callable[[str], str]) -> None:
    """Refuses a graph that reads a tensor of another one, which a layer has kept of its call."""
    for outer, inner in function.graph.captures:
        if tf.is_symbolic_tensor(outer):
            reader = next(iter(inner.consumers()), inner.op)
            raise UnsupportedModelError(
                f"{place(reader.name)} reads '{outer.name}', a tensor that a layer has kept of its "
                "call: it is there in the stage of that layer only, and not in losses and metrics. "
                "Let the layer return it, and pass it on, or make it an output of the model."
            )


def effects_of(definition: Any) -> Iterator[Effect]:
    """Finds the effects of a graph, those in its loops and branches among them."""
    library = {function.signature.name: function for function in definition.library.function}
    yield from _scan(definition.node, library)


def read_late(
    function: Any,
    moments: Sequence[tuple[Any, Any]],
    results: Sequence[Any],
    bounds: Container[int] = (),
) -> Any | None:
    """A moving average that results follow from, but by what is taken, once it has been written.

    `bounds` are places in the graph where all begins anew.
    """
    own = {id(average.value.handle): average for average, _ in moments}
    captures = ((inner.op.name, own.get(id(outer))) for outer, inner in function.graph.captures)
    named = {name: average for name, average in captures if average is not None}
    writes: defaultdict[str, set[str]] = defaultdict(set)  # what each operation writes
    for effect in effects_of(function.graph.as_graph_def()) if named else ():
        writes[effect.operation] |= {effect.argument or ""} & named.keys()
    stops = {tensor.ref() for _, tensor in moments}
    _, above = frontier(results, lambda tensor: tensor.ref() in stops)
    before: set[str] = set()
    for place, op in enumerate(function.graph.get_operations() if writes else ()):
        if place in bounds:
            before.clear()
        for name in before & {tensor.op.name for tensor in op.inputs} if op in above else ():
            return named[name]
        before |= writes.get(op.name, set())
    return None


def _scan(nodes: Iterable[Any], library: Mapping[str, Any]) -> Iterator[Effect]:
    made = {node.name: node for node in nodes}
    for node in made.values():
        given = [_origin(name, made) for name in node.input if not name.startswith("^")]
        called = [library[name] for name in _functions(node) if name in library]
        for function in called:
            arguments = [argument.name for argument in function.signature.input_arg]
            passed = dict(zip(arguments, given[node.op in _BRANCHES :], strict=False))
            for effect in _scan(function.node_def, library):
                argument = None if effect.argument is None else passed.get(effect.argument)
                yield Effect(node.name, argument if effect.argument is None else argument or "")
        if called:
            continue
        if "seed" in node.attr and "seed2" in node.attr:
            yield Effect(node.name, None)
        # A `tf.random.Generator` draws with stateful operations.
        elif node.op.startswith((*_WRITES, "Stateful")) and "Call" not in node.op:
            yield Effect(node.name, given[0])


def _functions(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def _origin(name: str, made: Mapping[str, Any]) -> str:
    """The operation, or argument of a function, that a value comes from unchanged."""
    name = name.split(":")[0]
    while name in made and made[name].op == "Identity":
        name = made[name].input[0].split(":")[0]
    return name


def place_of(operation: str, layer: Any, written: str = "") -> str:
    """The innermost layer in whose scope an operation is, given the variable that it writes."""
    names = {part.name for part in sublayers(layer) if part is not layer}
    for scope in reversed(operation.split("/")):
        head, _, number = scope.rpartition("_")
        found = names & {scope, head if number.isdigit() else ""}
        # A scope that is entered again has a number more, as another layer's name may have.
        if found:
            return f"Layer '{min(found, key=lambda name: (name not in written, name != scope))}'"
    return f"Operation '{operation}'"
