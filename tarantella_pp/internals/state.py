"""The private names of Keras that saving and an optimizer's slots need."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.optimizers import parts_of, scales_dynamically, wrapped_in

# Kind of a slot, and `id` of a weight that it serves; `None` if it serves the optimizer.
Key: TypeAlias = tuple[str, int | None]
# What optimizers keep their books with.
_BOOKS = ("_variables", "_trainable_variables", "_inner_optimizers")


@dataclass(frozen=True, slots=True)
class Slot:
    """A variable of an optimizer."""

    kind: str  # its attribute, the same for all weights
    weights: tuple[Any, ...]  # one, all of an inner optimizer, or none: it serves the whole
    variable: Any
    part: int  # 0 for the optimizer itself, otherwise the number of the inner one that has it
    part_class: str

    @property
    def keys(self) -> list[Key]:
        """What it is found by, in this optimizer or in one for other weights."""
        return [(self.kind, id(weight)) for weight in self.weights] or [(self.kind, None)]


class Place(NamedTuple):
    """A slot in the optimizer of a whole model; see `Slot`."""

    kind: str
    positions: list[int]  # of the weights that it serves, among all that are trained
    part: int
    part_class: str


def slots_of(optimizer: Any) -> list[Slot]:
    """The slots of an optimizer, in the order in which it saves them."""
    # Lists have an entry for each weight; all other variables belong to the optimizer as a whole.
    slots: dict[int, Slot] = {}
    for number, part in enumerate(parts_of(optimizer)):
        weights = trained_by(part)
        has_all = part in (optimizer, wrapped_in(optimizer))
        served = () if has_all else tuple(weights)
        prefix = "" if not number else "inner " if weights or has_all else f"inner {number} "
        where = (number, type(part).__name__)
        for name, value in vars(part).items():
            if isinstance(value, keras.Variable):
                slots[id(value)] = Slot(prefix + name, served, value, *where)
            elif _is_per_weight(name, value, weights):
                for weight, variable in zip(weights, value, strict=True):
                    slots.setdefault(id(variable), Slot(prefix + name, (weight,), variable, *where))
    if strange := [v.path for v in optimizer.variables if id(v) not in slots]:
        raise UnsupportedModelError(
            f"Optimizer {type(optimizer).__name__} keeps {strange} neither in an attribute nor in "
            "a list with one entry for each weight, so they cannot be divided among ranks. Keep "
            "them as Keras' own optimizers do: a list for each kind, filled in `build`."
        )
    return [slots[id(variable)] for variable in optimizer.variables]


def name_by_path(variable: Any, path: str) -> None:
    """Gives a variable the path by which optimizers look for it."""
    variable._path = path


def trained_by(optimizer: Any) -> list[Any]:
    """The weights that an optimizer was built for, in its order; none if it is not built."""
    return list(optimizer._trainable_variables) if optimizer.built else []


def rebuild(optimizer: Any, weights: Sequence[Any]) -> None:
    """Makes an optimizer one for other weights; it keeps its options, steps, and what it knows."""
    built, values = optimizer.built, _take_down(optimizer)
    _build(optimizer, weights, values, built)


def divide(optimizer: Any, weights: Sequence[Any], share: Sequence[Any]) -> list[Place]:
    """Makes an optimizer one for a part of a model; see `rebuild`."""
    _refuse_hidden(parts_of(optimizer))
    held, built = trained_by(optimizer), optimizer.built
    values = _take_down(optimizer)
    stand_ins = [stand_in(weight) for weight in weights]
    positions = {id(weight): i for i, weight in enumerate(stand_ins)}
    kept = {id(variable) for variable in optimizer.variables}
    # Built once for the whole model, whose weights need not be here, with variables of one element:
    # so every rank knows all slots and their order, by which files name them.
    then: Sequence[Any] = held  # as it was, if something fails
    try:
        _build_anew(optimizer, stand_ins)
        slots = [
            Place(s.kind, [positions[id(w)] for w in s.weights], s.part, s.part_class)
            for s in slots_of(optimizer)
        ]
        then = share
    finally:
        _unbuild(optimizer, kept)
        _build(optimizer, then, values, built)
    return slots


def _refuse_hidden(parts: Sequence[Any]) -> None:
    """Refuses optimizers that keep another one, of which Keras does not know."""
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, keras.optimizers.Optimizer) and value not in parts:
                raise UnsupportedModelError(
                    f"Optimizer {type(part).__name__} keeps another one, '{name}', whose slots are "
                    "not among its own, so they cannot be divided among ranks. Derive its class "
                    f"from {type(value).__name__} instead, or train replicas: tnt.Model(model)."
                )


def finalize_only(optimizer: Any, weights: Sequence[Any], then: Callable[[], None]) -> None:
    """Lets an optimizer do what Keras' `fit` asks for at its end for some weights only."""
    finalize = type(optimizer).finalize_variable_values

    def finalized(_: Any) -> None:
        finalize(optimizer, list(weights))
        if any(part.use_ema for part in parts_of(optimizer)):
            then()

    optimizer.finalize_variable_values = finalized


def refuse_as_whole(optimizer: Any, refuse: Callable[..., Any]) -> None:
    """Has an optimizer refuse to be written and read alone, as Keras and TensorFlow would."""
    for part in parts_of(optimizer):
        part.save_own_variables = part.load_own_variables = refuse
        part._trackable_children = refuse  # what `tf.train.Checkpoint` asks for


def compiled_with(model: Any) -> dict[str, Any]:
    """What a model was compiled with, to compile another one alike."""
    arguments = dict(model._compile_config.config)
    del arguments["jit_compile"]  # which Keras has resolved, and a pipeline does by itself
    return arguments


def forget_functions(model: Any) -> None:
    """Lets a model and those in it trace their steps anew: traced ones do not ask for weights."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None


def drop_value(variable: Any) -> None:
    """Gives back a variable's memory; what has captured it fails until it has a value again."""
    tf.raw_ops.AssignVariableOp(
        resource=variable._value.handle,
        value=tf.zeros([0], variable._value.dtype),
        validate_shape=False,
    )


def give_value(variable: Any, value: Any) -> None:
    """Gives a variable without one a value of its shape."""
    value = tf.cast(tf.convert_to_tensor(value, dtype_hint=variable._dtype), variable._dtype)
    if variable._value is None:
        variable._initializer = None
        with _scope_of(variable):
            variable._initialize(value)
    else:
        handle = variable._value.handle
        tf.raw_ops.AssignVariableOp(resource=handle, value=value, validate_shape=False)


def initialize(variable: Any) -> None:
    """Gives a variable that was made without a value the one that its initializer gives."""
    with _scope_of(variable):
        variable._deferred_initialize()


def become(one: Any, *classes: type) -> None:
    """Has an object that others hold be of more classes, under the name of its own."""
    one.__class__ = _mixed(type(one).__name__, classes)


@functools.cache
def _mixed(name: str, classes: tuple[type, ...]) -> type:
    return type(name, classes, {})


def class_before(own: type, first: type, **attributes: Any) -> Any:
    """Makes a class of one object alone, that Keras writes and finds as another one."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (first, own), {**names, **attributes})


def _scope_of(variable: Any) -> Any:
    """Where a layer makes a variable, whose name says so: optimizers exclude some by it."""
    return tf.name_scope(variable.path.removesuffix(variable.name))


def initializer_of(variable: Any) -> Any:
    """What a variable without a value is to begin with; `None` if it has begun."""
    return variable._initializer


@contextlib.contextmanager
def variables_without_values(made: list[Any]) -> Iterator[dict[int, Any]]:
    """Lets variables be made that have shapes and initializers, but no memory."""
    name = "uninitialized_variables"
    with _global_attribute(name, []):  # or the next scope to end gives them their memory
        try:
            with keras.StatelessScope(initialize_variables=False) as scope:
                yield scope.state_mapping
        finally:
            made += global_state.get_global_attribute(name, [])


def outside_stateless_scopes() -> contextlib.AbstractContextManager[None]:
    """Lets variables be made and read as if no stateless scope were open."""
    return _global_attribute("stateless_scope", None)


@contextlib.contextmanager
def _global_attribute(name: str, value: Any) -> Iterator[None]:
    """Has Keras find another value in its global state for a while."""
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


@contextlib.contextmanager
def given_values_kept() -> Iterator[None]:
    """Lets variables that are made of values (of optimizers, say) have them in stateless scopes."""
    maker: Any = next(kind for kind in keras.Variable.__mro__ if "__init__" in vars(kind))
    make = maker.__init__

    @functools.wraps(make)
    def made(self: Any, initializer: Any, *args: Any, **kwargs: Any) -> None:
        if callable(initializer) or isinstance(initializer, str):
            make(self, initializer, *args, **kwargs)
            return
        with outside_stateless_scopes():
            make(self, initializer, *args, **kwargs)

    with mock.patch.object(maker, "__init__", made):
        yield


_traced = contextvars.ContextVar("_traced", default=False)


def only_traced(is_so: bool = True) -> contextlib.AbstractContextManager[None]:
    """Says that what is traced inside is looked at and never run."""
    return meanwhile(_traced, is_so)


@contextlib.contextmanager
def meanwhile(setting: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Gives a variable of the context a value for a while."""
    before = setting.set(value)
    try:
        yield
    finally:
        setting.reset(before)


def needs_only_shapes() -> bool:
    """Whether a layer runs just now to learn the shapes of what it returns."""
    return _traced.get() or bool(in_symbolic_scope())


def _take_down(optimizer: Any) -> dict[Key, Any]:
    """Makes an optimizer unbuilt; returns its slots."""
    slots = slots_of(optimizer)
    values = {key: slot.variable for slot in slots for key in slot.keys}
    # A slot with an attribute for itself may be older than the others, and made outside `build`.
    alone = {id(value) for part in parts_of(optimizer) for value in vars(part).values()}
    _unbuild(optimizer, alone & {id(slot.variable) for slot in slots})
    return values


def _unbuild(optimizer: Any, kept: set[int]) -> None:
    """Takes away all slots but some, as they were before an optimizer was built."""
    parts = parts_of(optimizer)
    # Keras makes these two at once, all other slots in `build`.
    kept = kept | {id(v) for part in parts for v in (part._iterations, part._learning_rate)}
    for part in parts:
        for name, value in list(vars(part).items()):
            held = value if isinstance(value, (list, tuple)) else [value]
            others = (isinstance(v, keras.Variable) and id(v) not in kept for v in held)
            if name not in _BOOKS and any(others):
                delattr(part, name)
        for variable in list(part._variables):
            if id(variable) not in kept:
                part._untrack_variable(variable)
        part._trainable_variables = []
        part._trainable_variables_indices = {}
        part.built = False
    for part in parts:
        if isinstance(part, keras.optimizers.MultiOptimizer):
            # Those that it knows before it is built, in its order.
            named = part._optimizer_map
            values = list(named.values()) if hasattr(named, "values") else []
            inner = dict.fromkeys([*values, getattr(named, "default_optimizer", None)])
            part._inner_optimizers = [each for each in inner if each is not None]


def _build(optimizer: Any, weights: Sequence[Any], values: Mapping[Key, Any], built: bool) -> None:
    """Builds an optimizer, and gives it what it knew before."""
    if not weights and not (built and scales_dynamically(optimizer)):  # whose scale all ranks need
        return
    _build_anew(optimizer, weights)
    for slot in slots_of(optimizer):
        if (value := _value_before(slot, values)) is not None:
            slot.variable.assign(value)


def _value_before(slot: Slot, values: Mapping[Key, Any]) -> Any:
    """What a slot, or the slot of the whole weight, was before an optimizer was built anew."""
    for key in slot.keys:
        if key in values:
            return None if values[key] is slot.variable else values[key].value
    columns: Any = getattr(slot.weights[0], "_columns", None) if len(slot.weights) == 1 else None
    before = None if columns is None else values.get((slot.kind, id(columns.whole)))
    return None if before is None else columns.of(before.value)


def _build_anew(optimizer: Any, weights: Sequence[Any]) -> None:
    """Builds an optimizer, and forgets slots that have been replaced by new ones."""
    older = list(optimizer.variables)
    with tf.variable_creator_scope(_under_one_name):
        optimizer.build(list(weights))
    parts = parts_of(optimizer)
    held = {id(value) for part in parts for value in vars(part).values()}
    for part in parts:
        for variable in older:
            if id(variable) not in held:
                part._untrack_variable(variable)


def _under_one_name(make: Callable[..., Any], **arguments: Any) -> Any:
    """Makes a variable of TensorFlow, which keeps 36 KB for each name for ever."""
    return make(**{**arguments, "name": "slot"})


def _is_per_weight(name: str, value: Any, weights: Sequence[Any]) -> bool:
    if not isinstance(value, (list, tuple)) or name in _BOOKS or len(value) != len(weights):
        return False
    return all(slot is None or isinstance(slot, keras.Variable) for slot in value)


def stand_in(weight: Any) -> Any:
    """A small variable that an optimizer takes for a weight: number of axes, type and name."""
    variable = keras.Variable(
        np.zeros((1,) * len(weight.shape)), dtype=weight.dtype, name=weight.name
    )
    variable._path = weight.path
    variable.overwrite_with_gradient = weight.overwrite_with_gradient
    return variable
