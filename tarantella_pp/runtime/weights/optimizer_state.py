"""The slots of an optimizer, on the ranks of the weights that they serve; the state of training.

All that training changes has keys that are the same on any number of ranks. Each key is written
by one rank, and read by those that need it::

    model/3         the fourth variable of the model: weight, statistics, seed
    model/4/0:64    the first 64 columns of the fifth, which stages have in parts
    optimizer/5     the sixth of the whole optimizer, as plain Keras saves it
    metric/0        of the metrics, once a batch has made them
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals import state
from tarantella_pp.internals.optimizers import scales_dynamically
from tarantella_pp.internals.parted import columns_in, columns_of, in_parts, put_together, whole_of
from tarantella_pp.runtime.comm.collective import digest, on_all_ranks
from tarantella_pp.runtime.comm.communicator import TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import variable_dtype
from tarantella_pp.runtime.weights.rank_weights import RankWeights, VariableTable
from tarantella_pp.runtime.weights.shared_weights import Array, ValueStream


class OptimizerState:
    """One rank's share of the optimizer of the whole model.

    Every rank knows all slots of the whole optimizer, in the order in which plain Keras saves
    them, by their kind and by the position of their weight among those that are trained. Making
    one takes all ranks; an optimizer that has been built for the whole model is left with this
    rank's share of its slots.
    """

    def __init__(
        self,
        optimizer: Any,
        weights: Sequence[Any],
        table: VariableTable,
        finalized: Callable[[], None],
    ) -> None:
        self._finalized = finalized
        self._optimizer = optimizer
        self._table = table
        self._communicator = communicator = table.ranks
        self._ranks = [table[weight].trainer for weight in weights]
        self._own = list(filter(table.trains, weights))
        self._positions = {id(weight): i for i, weight in enumerate(weights)}
        self._slots: list[state.Place] = []
        # Whether it is as in one process: one rank has all weights, and none is in parts
        self._is_plain = communicator.size == 1 and not any(map(columns_of, weights))
        if not self._is_plain:
            self._slots = self._agreed(weights)
            state.refuse_as_whole(optimizer, self._refuse)
        # The slots that files have, each one or the parts of one, in turn; and what these call ours
        saved: dict[Any, list[int]] = {}
        self._numbers: dict[tuple[str, int | None], int] = {}
        for number, place in enumerate(self._slots):
            wholes = tuple(id(whole_of(weights[position])) for position in place.positions)
            saved.setdefault((place.kind, place.part, wholes or number), []).append(number)
            for position in place.positions or (None,):
                self._numbers[place.kind, position] = number
        self._saved = list(saved.values())
        self._keys: dict[int, str] = {}
        for number, slots in enumerate(self._saved):
            for slot in slots:
                served = [columns_of(weights[place]) for place in self._slots[slot].positions]
                only = served[0] if len(served) == 1 else None
                self._keys[slot] = str(number) if only is None else only.key(number)

    def serves(self, weights: Sequence[Any]) -> bool:
        """Whether these are the weights that it was made for."""
        return list(self._positions) == [id(weight) for weight in weights]

    def build(self) -> None:
        """Gives the optimizer the slots of this rank's weights, and no others."""
        held = in_parts(state.trained_by(self._optimizer))
        if self._is_plain:
            if not held and self._own:
                self._optimizer.build(self._own)
            return
        share = list(filter(self._table.trains, held)) if held else self._own
        if len(share) != len(held):
            state.rebuild(self._optimizer, share)
        if not self._optimizer.built:
            self._optimizer.build([])  # for the scale of losses, and for averages of no weights
        state.finalize_only(self._optimizer, self._own, self._finalized)
        self._held()

    def streamed(self, stream: ValueStream) -> Any:
        """What Keras saves for the whole optimizer, slots read when it does; takes all ranks."""
        if self._is_plain:
            return self._optimizer
        self.build()
        held, ranks = self._held(), self._communicator
        mine = {str(i): [list(v.shape), variable_dtype(v).name] for i, v in held.items()}
        described: dict[int, Any] = {
            int(i): d for theirs in ranks.allgather_json(mine) for i, d in theirs.items()
        }
        read = stream.add(held.__getitem__)

        def value_of(slots: Sequence[int]) -> Array:
            parts = {}
            for slot in slots:
                shape, dtype = described[slot]
                owner = ranks.world_ranks[self._source(self._slots[slot].positions)]
                columns = self._keys[slot].partition("/")[2]
                parts[columns] = read(owner, slot, TensorSpec(tuple(shape), dtype))
            return put_together(parts)

        values = [functools.partial(value_of, slots) for slots in self._saved]
        return self._stand_in(dict(enumerate(values)))

    def needed(self) -> dict[str, Any]:
        """The slots of this rank, by what files call them; takes all ranks."""
        self.build()
        if self._is_plain:
            return {str(i): slot for i, slot in enumerate(self._optimizer.variables)}
        return {self._keys[i]: slot for i, slot in self._held().items()}

    def owned(self) -> dict[str, Any]:
        """As `needed`, but only the slots that this rank tells of for all."""
        if not self._table.speaks:
            return {}
        rank, needed = self._communicator.rank, self.needed()
        if self._is_plain:
            return needed
        sources = ((key, self._slots[i].positions) for i, key in self._keys.items())
        own = {key for key, positions in sources if self._source(positions) == rank}
        return {key: slot for key, slot in needed.items() if key in own}

    def receiver(self) -> Any:
        """An optimizer that keeps of what it loads this rank's share; takes all ranks."""
        if self._is_plain:
            return self._optimizer
        name = self._optimizer.name
        if not self._communicator.broadcast_json(self._optimizer.built, self._source([])):
            variables = {str(i): slot for i, slot in enumerate(self._optimizer.variables)}
            return _StandIn(name, range(len(variables)), variables)
        return _StandIn(name, range(len(self._saved)), self.needed())

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise ConfigurationError(
            f"The slots of optimizer {self._optimizer.name} are shared out, so it cannot be "
            "written or read by itself. Use `save` and `load_weights` of the model, or "
            "`tnt.callbacks.Checkpoint`; for `save_to_preset` load the file in one process."
        )

    def _agreed(self, weights: Sequence[Any]) -> list[state.Place]:
        """Divides the optimizer, in the same way on all ranks."""
        name, held = self._optimizer.name, in_parts(state.trained_by(self._optimizer))
        # Before it is divided, which takes slots of other ranks away.
        all_slots = digest(self._optimizer.variables) if len(held) == len(weights) else None

        def divided() -> list[state.Place]:
            known = {id(weight) for weight in held}
            if unknown := [weight.path for weight in self._own if held and id(weight) not in known]:
                raise ConfigurationError(
                    f"Optimizer {name} was built for other weights, not for {unknown}. Pass a new "
                    "optimizer."
                )
            return state.divide(self._optimizer, weights, [*filter(self._table.trains, held)])

        slots = on_all_ranks(self._communicator, f"use optimizer {name}", divided)
        answers = self._communicator.allgather_json([slots, all_slots])
        if len({values for _, values in answers if values is not None}) > 1:
            raise ConfigurationError(
                f"The slots of optimizer {name} differ between ranks. Load the same file on all "
                "ranks before you wrap the model, or pass a new optimizer."
            )
        for rank, (theirs, _) in enumerate(answers):
            if theirs != answers[0][0]:
                raise ConfigurationError(
                    f"Optimizer {name} treats weights otherwise on rank {rank} than on rank 0: it "
                    "looks at their paths, which begin with the names of layers. Give the layers "
                    "names, or build the same models on all ranks."
                )
        return slots

    def _held(self) -> dict[int, Any]:
        """This rank's slots, by their number in the whole optimizer."""
        held = {}
        for slot in state.slots_of(self._optimizer):
            positions = [self._positions.get(id(w)) for w in slot.weights] or [None]
            numbers = [self._numbers.get((slot.kind, position)) for position in positions]
            held.update({number: slot.variable for number in numbers if number is not None})
        mine = {i for i, rank in enumerate(self._ranks) if rank == self._communicator.rank}
        own = {i for i, place in enumerate(self._slots) if not mine.isdisjoint(place.positions)}
        if self._optimizer.built and not own <= set(held):
            raise UnsupportedModelError(
                f"Optimizer {type(self._optimizer).__name__} makes other slots for large weights "
                "than for small ones, so ranks cannot know each other's. Train in one process, or "
                "with one of Keras' own optimizers."
            )
        return held

    def _source(self, positions: Sequence[int]) -> int:
        """The rank with the values of a slot; one that serves no single weight is on several."""
        return self._ranks[positions[0] if positions else 0] if self._ranks else 0

    def _stand_in(self, values: Mapping[int, Callable[[], Array]]) -> _StandIn:
        parts: dict[tuple[int, str], list[int]] = {}
        places = [self._slots[slots[0]] for slots in self._saved]
        for number, place in enumerate(places):
            parts.setdefault((place.part, place.part_class), []).append(number)
        wraps = scales_dynamically(self._optimizer)
        named = [(name, own) for (part, name), own in parts.items() if part > wraps]
        inner = [type(name, (_StandIn,), {})(name, own, values) for name, own in named]
        name, numbers = self._optimizer.name, range(len(places))
        if not wraps:
            return _StandIn(name, numbers, values, inner)
        wrapped = [number for number in numbers if places[number].part]
        found = _StandIn(name, numbers, values)
        found.inner_optimizer = _StandIn("wrapped", wrapped, values, inner)
        return found


class _StandIn(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What Keras saves and loads instead of the optimizer of a whole model."""

    def __init__(
        self,
        name: str,
        slots: Sequence[int],
        share: Mapping[Any, Any],
        inner: Sequence[_StandIn] = (),
    ) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self._slots = slots
        self._share = tuple(share.items())  # a dict of variables would be one of its own for Keras
        self.optimizers = list(inner)

    def save_own_variables(self, store: Any) -> None:
        """Writes all slots."""
        share = dict(self._share)
        for i, number in enumerate(self._slots):
            store[str(i)] = share[number]()

    def load_own_variables(self, store: Any) -> None:
        """Takes over the slots of this rank, if there are as many as there should be."""
        # As Keras does: a file of another optimizer is warned of, and leaves the state alone.
        count = len(store.keys())
        if count != len(self._slots):
            warnings.warn(
                f"Optimizer '{self.name}' keeps its state: it has {len(self._slots)} variables, "
                f"the file has {count}.",
                stacklevel=2,
            )
            return
        for key, variable in self._share:
            number, _, columns = key.partition("/")
            variable.assign(columns_in(store[number], columns))


@dataclass(frozen=True)
class StateShare:
    """One rank's share of the state of training."""

    weights: RankWeights
    optimizer: OptimizerState | None
    metric_owners: Callable[[], Iterable[tuple[Any, int]]]  # variables of metrics, and their ranks

    def owned(self) -> dict[str, Any]:
        """What this rank writes."""
        metrics = self.metrics() if self.weights.groups.replica == 0 else {}
        optimizer = {} if self.optimizer is None else self.optimizer.owned()
        return _keyed("model", self.weights.owned()) | _keyed("optimizer", optimizer) | metrics

    def needed(self) -> dict[str, Any]:
        """What this rank must read, but for metrics."""
        optimizer = {} if self.optimizer is None else self.optimizer.needed()
        return _keyed("model", self.weights.needed()) | _keyed("optimizer", optimizer)

    def metrics(self) -> dict[str, Any]:
        """The variables of metrics that this rank updates; none before the first batch."""
        rank, owners = self.weights.groups.pipeline.rank, self.metric_owners()
        return _keyed("metric", {i: v for i, (v, owner) in enumerate(owners) if owner == rank})


def spec_of(variable: Any) -> tuple[str, tuple[int, ...]]:
    """Name of the dtype of a variable, and its shape."""
    return variable_dtype(variable).name, tuple(variable.shape)


def _keyed(kind: str, found: Mapping[Any, Any]) -> dict[str, Any]:
    return {f"{kind}/{number}": variable for number, variable in found.items()}
