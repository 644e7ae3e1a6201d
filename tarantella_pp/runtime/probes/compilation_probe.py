"""What a model is compiled with, tried: losses and metrics in parts, weights read past layers.

A loss, metric, regularizer or constraint that reads a weight past what it is given would lose its
gradient: ranks compute losses of outputs, and regularizers of one weight each.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.functional import compute_output_spec
from tarantella_pp.internals.parted import in_parts, wholes
from tarantella_pp.internals.training import (
    SecondLoss,
    compiled_loss,
    compiled_metrics,
    losses_of_outputs,
    made_by_keras,
    reduces_values,
    sample_values,
)
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.probes.constants import Constant, constants_of
from tarantella_pp.runtime.probes.linearity import (
    first_sums,
    following,
    moves_samples,
    nonlinear,
    uses_of_sums,
)
from tarantella_pp.runtime.probes.parts import (
    ALL,
    MEAN,
    ROWS,
    SUM,
    Array,
    Compared,
    PartsProbe,
    Samples,
    chosen,
    kinds_of,
    some_rows,
)
from tarantella_pp.runtime.stage.graph_functions import dense_tensors, flattened
from tarantella_pp.runtime.stage.graph_split import has_effect
from tarantella_pp.runtime.stage.model_outputs import symbolic_outputs
from tarantella_pp.runtime.stage.side_effects import effects_of, refuse_kept

Shape = Sequence[int | None]

# Another number of samples than any size, so that no axis is taken for the batch by mistake.
_ROWS, _LARGEST = 5, 3
# Numbers of a sample's output beyond which fewer are tried.
_MANY = 100_000
# Samples that metrics are tried with, one of them and the others; few, for some models have large
# ones. And which of them are not set to zero the second time: of each part another share.
_METRIC_ROWS, _KEPT = 3, (True, False, True)
# What a metric may do besides changing its variables.
_HARMLESS = ("Assert", "CheckNumericsV2")


class LossKinds(NamedTuple):
    """How the loss of a batch follows from its micro-batches."""

    reason: str | None  # why it does not, if so
    # For each loss, how its values follow: rows, or a mean or a sum over samples
    kinds: Sequence[str]


def loss_kinds(compiled: Any, extracted: ExtractedModel, y: Any = None) -> LossKinds:
    """Tries all losses of a model; `y` describes the targets if they are known."""
    if compiled is None:
        return LossKinds(None, ())
    graph = extracted.graph
    if any(graph.tensors[output].mask_shape is not None for output in graph.outputs):
        return LossKinds(
            "the model's output carries a mask, and its loss counts unmasked entries only", ()
        )
    found: list[tuple[Any, Any, list[Shape]]] = []

    def note(loss: Any, y: Any, y_pred: Any, _: Any) -> Any:
        found.append((loss, y, [tuple(tensor.shape) for tensor in keras.tree.flatten(y_pred)]))
        return keras.ops.zeros(())

    outputs = symbolic_outputs(extracted)
    try:
        compute_output_spec(SecondLoss(compiled, note), outputs if y is None else y, outputs)
    except (KeyError, TypeError, ValueError):
        if y is not None:
            raise  # as Keras does, at the first batch, of losses that do not fit the outputs
    trials = [_tried(loss, None if y is None else t, shapes) for loss, t, shapes in found]
    reason = next((reason for reason, _ in trials if reason), None)
    return LossKinds(reason, [kind for _, kind in trials])


def _tried(loss: Any, y: Any, shapes: Sequence[Shape]) -> tuple[str | None, str]:
    """Why a loss needs the whole batch, if it does; and the kind of its values."""
    if loss.reduction in (None, "none"):
        return f"loss '{loss.name}' has reduction={loss.reduction!r}", ROWS
    if len(shapes) != 1 or not reduces_values(loss):
        return f"loss '{loss.name}' may look at several samples at once", ROWS
    own = [] if y is None else keras.tree.flatten(y)
    found = value_kinds(loss, shapes[0], own[0] if len(own) == 1 else None)
    if found is None:
        return f"loss '{loss.name}' does not take the targets that it was tried with", ROWS
    if found >= {MEAN, SUM}:
        return f"loss '{loss.name}' has terms that are zero for the targets it is tried with", ROWS
    kind = chosen(found, (ROWS, MEAN, SUM))
    if kind is None:
        return f"loss '{loss.name}' looks at several samples at once", ROWS
    return None, kind


def value_kinds(loss: Any, shape: Shape, y: Any = None) -> frozenset[str] | None:
    """Says how a loss follows from the losses of parts; `None` if it takes no targets."""
    own = None if y is None else tuple(y.shape[1:])
    found, is_known = ALL, False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a loss thinks of made-up data
        for number, data in enumerate(_data(_sizes(shape), own)):
            for kinds in _known_kinds(loss, number, data):
                found, is_known = found & kinds, True
    return found if is_known else None


# What losses of Keras have shown, which are asked again and again: by their configuration.
_known: dict[Any, list[frozenset[str]]] = {}


def _known_kinds(
    loss: Any, number: int, data: Sequence[tuple[Array, Array]]
) -> Iterable[frozenset[str]]:
    if not made_by_keras(loss):
        return _kinds(loss, data)
    # Its `get_config` may leave out options, as `CosineSimilarity` does the axis.
    config = [x for x in vars(loss).items() if x[0] not in ("name", "reduction")]
    key = repr([type(loss), config, number, [x.shape for x in data[0]], keras.config.floatx()])
    if key not in _known:
        _known[key] = list(_kinds(loss, data))
    return _known[key]


def _sizes(shape: Shape) -> list[int]:
    """The sizes of what a loss is tried with: its own, unless they are large or vary."""
    sizes = [_LARGEST if size is None else size for size in shape[1:]]
    return sizes if math.prod(sizes) <= _MANY else [min(size, _LARGEST) for size in sizes]


def _data(sizes: list[int], own: tuple[int, ...] | None) -> Iterator[list[tuple[Array, Array]]]:
    """Targets of any size, beside zeros and ones, and classes; with outputs, by shape."""
    rng = np.random.default_rng(0)
    y_pred, values = rng.uniform(0.1, 0.9, (2, _ROWS, *sizes))
    every_other = np.arange(_ROWS).reshape(-1, *[1] * len(sizes)) % 2
    beside = np.where(every_other, values, values > 0.5)  # the first part has zeros and ones alone
    numbers = rng.normal(scale=4.0, size=(2, _ROWS, *sizes))
    yield [(values, y_pred), (beside, y_pred), (numbers[0], numbers[1])]
    if sizes:
        yield [(np.arange(y_pred[..., 0].size).reshape(y_pred.shape[:-1]) % 2, y_pred)]
    if own is not None and list(own) != sizes and None not in own:
        targets = rng.uniform(0.0, 1.0, (_ROWS, *own))
        yield [(targets, y_pred), (np.round(targets), numbers[1])]


def _kinds(loss: Any, data: Sequence[tuple[Array, Array]]) -> Iterator[frozenset[str]]:
    """The kinds that its values may be of with data of one shape, as far as it takes them."""

    def values(y: tf.Tensor, y_pred: tf.Tensor) -> list[tf.Tensor]:
        found, mask = sample_values(loss, y, y_pred)
        (gradient,) = tf.gradients(found, y_pred, unconnected_gradients="zero")
        return [found, gradient, tf.cast([] if mask is None else mask, found.dtype)]

    specs = [tf.TensorSpec([None, *part.shape[1:]], keras.config.floatx()) for part in data[0]]
    try:
        # TensorFlow warns on standard error of shapes that do not fit, but not while it traces.
        described = [keras.KerasTensor(part.shape, str(part.dtype)) for part in data[0]]
        compute_output_spec(functools.partial(sample_values, loss), *described)
        traced = tf.function(values, input_signature=specs, autograph=False)
        function = traced.get_concrete_function()
    except Exception:  # whatever a loss says to targets of another shape
        return
    refuse_kept(function, lambda _: f"Loss '{loss.name}'")
    value, follows = function.outputs[0], following(function.graph, function.inputs[:2])
    used = uses_of_sums([value], follows) if value.shape.rank else [nonlinear([value], follows)]
    # It draws random numbers or counts its calls; or samples may see each other with other data.
    mixes = any(effects_of(function.graph.as_graph_def())) or any(used)
    if not (mixes or made_by_keras(loss)):
        mixes = moves_samples(value, follows) or _counts(values, function, data[0])
    if mixes:
        yield frozenset()
        return
    # A term that is zero for made-up targets may be a sum beside a mean.
    terms = [] if value.shape.rank else first_sums([value], follows)
    sure = {MEAN} if terms and all(term.op.type == "Mean" for term in terms) else ALL
    terms = terms if sure == ALL else []
    probe = PartsProbe(function, function.inputs[:2], [*function.outputs, *terms])
    for pair in data:
        kinds = _kinds_with(probe, *pair)
        if kinds is not None:
            yield kinds & sure


def _counts(values: Any, function: Any, data: tuple[Array, Array]) -> bool:
    """Whether a loss leaves samples out, or computes otherwise where it knows their number."""
    given = _samples(*data).tensors
    known = tf.function(values, autograph=False).get_concrete_function(*given)
    pairs = zip(function(*given), known(*given), strict=True)
    leaves_out = known.outputs[0].shape[:1] == [None]
    return leaves_out or not all(np.allclose(a, b, equal_nan=True) for a, b in pairs)


def _kinds_with(probe: PartsProbe, y: Array, y_pred: Array) -> frozenset[str] | None:
    """The kinds that values may be of with such data; `None` if a loss does not take them."""
    try:
        found, other = (probe.compare(_samples(y, made)) for made in (y_pred, y_pred[::-1]))
    except Exception:  # whatever it says to targets of another kind
        return None
    whole, _, mask, *terms = found.whole.values
    if not np.array_equal(mask, other.whole.values[2]):
        return frozenset()  # a mask must follow from the targets
    parts = [part.values[0] for part in found.parts]
    if not all(np.isfinite(value).all() for value in (whole, *parts)):
        return None
    if whole.ndim and whole.shape[0] != _ROWS:
        return frozenset()
    if y.shape != y_pred.shape and any(part.shape[1:] != whole.shape[1:] for part in parts):
        return None  # Keras spreads such targets over other samples: refused with the batch itself
    kinds = found.kinds(0) & found.kinds(2)
    kinds = frozenset(kind for kind in kinds if _adds_up(found, kind))
    if kinds and not all(map(np.any, terms)):
        return frozenset((MEAN, SUM))  # it may be either
    return kinds & ({ROWS} if whole.ndim else {MEAN, SUM})


def _adds_up(found: Compared, kind: str) -> bool:
    """Whether its gradients, which may be declared to be others, follow from parts as it does."""
    gradients = [run.values[1] for run in (found.whole, *found.parts)]
    whole, *parts = [g * len(g) if kind == MEAN else g for g in gradients]
    return ROWS in kinds_of(0.0, whole, parts, found.shares, found.tolerance)


def _samples(*data: Array) -> Samples:
    return Samples(_ROWS, [tf.constant(part, keras.config.floatx()) for part in data])


def why_not_by_parts(
    metrics: Any,
    pack: Callable[[Sequence[tf.Tensor]], Any],
    y: Any,
    outputs: Sequence[tf.TensorSpec],
    weight: Any,
) -> str | None:
    """Tries whether what parts of a batch add to metrics is what the batch adds."""
    rng = np.random.default_rng(0)
    owners = [metric for metric in metrics.metrics for _ in metric.variables]
    try:
        y, weight = tf.nest.map_structure(lambda t: some_rows(t, _METRIC_ROWS), (y, weight))
        results = [_made_up(spec, y, rng) for spec in outputs]
        examples = (y, results, weight)
        probe = _probe(metrics, pack, examples, owners)
        if isinstance(probe, str):
            return probe
        zeros = tf.nest.map_structure(_with_zeros, (y, weight))
        masked = [  # by other masks
            tf.constant(rng.uniform(size=result.shape) < 0.5) if result.dtype.is_bool else result
            for result in results
        ]
        # What looks at the share of zeros, or of masked values, shows itself the second time.
        for tried in (examples, (zeros[0], masked, zeros[1])):
            found = probe.compare(Samples(_METRIC_ROWS, dense_tensors(tried)))
            for i, metric in enumerate(owners):
                if not np.all(np.isfinite(found.whole.state[i])):
                    return f"metric '{metric.name}' is no number for made-up outputs"
                if SUM not in found.kinds_of_state(i):
                    return _mixes(metric)
    except Exception as error:  # made-up data may be wrong for it in any way
        return f"the metrics cannot be tried with made-up outputs ({type(error).__name__}: {error})"
    return None


def _mixes(metric: Any) -> str:
    return f"metric '{metric.name}' looks at several samples at once"


def _probe(
    metrics: Any, pack: Callable[[Sequence[tf.Tensor]], Any], examples: Any, owners: Sequence[Any]
) -> PartsProbe | str:
    """Traces the update of the metrics, or says why no trial of it would show enough."""

    def update(y: Any, results: Sequence[tf.Tensor], weight: Any) -> None:
        metrics.update_state(y, pack(results), weight)

    run, specs = flattened(update, examples, any_rows=True)
    traced = tf.function(run, input_signature=specs, autograph=False).get_concrete_function()
    variables = [variable.value for variable in metrics.variables]
    handles = {id(v.handle): metric for v, metric in zip(variables, owners, strict=True)}
    pairs = traced.graph.captures
    own = {inner.op: handles[id(outer)] for outer, inner in pairs if id(outer) in handles}
    effects = [op for op in traced.graph.get_operations() if has_effect(op)]
    writes = [op for op in effects if op.type.startswith("Assign") and op.inputs[0].op in own]
    if any(op not in writes and op.type not in _HARMLESS for op in effects):
        return "a metric does more than to change its own variables"
    inputs = traced.inputs[: len(specs)]
    follows = following(traced.graph, inputs)
    for op in writes:
        metric = own[op.inputs[0].op]
        # Of Keras' own, hinges look at all labels: whether these are 0 and 1, or -1 and 1.
        if not made_by_keras(metric) and nonlinear(op.inputs[1:], follows) is not None:
            return _mixes(metric)  # which may show with other samples only
    return PartsProbe(traced, inputs, [], (writes, variables))


def _made_up(spec: tf.TensorSpec, y: Any, rng: np.random.Generator) -> tf.Tensor:
    """Outputs without two like values; dimensions that vary are as in the targets."""
    known = dense_tensors((y,))[0].shape
    shape = [
        size if size is not None else known[i] if i < len(known) else 2
        for i, size in enumerate(spec.shape)
    ]
    highest = 1.0 if spec.dtype.is_floating else 2.0
    return tf.cast(rng.uniform(0.0, highest, [_METRIC_ROWS, *shape[1:]]), spec.dtype)


def _with_zeros(tensor: Any) -> Any:
    """The tensor with some samples zero."""
    if tensor is None:
        return None
    return tf.where(tf.reshape(_KEPT, [-1] + [1] * (len(tensor.shape) - 1)), tensor, 0)


def refuse_weights_reached(
    model: Any, extracted: ExtractedModel, table: Any, last_rank: int, given: Any
) -> list[Constant]:
    """Refuses functions of a compiled model that read weights past what they are given.

    What is trained or written is another one meanwhile, and what other ranks have is not there.
    Returns the constants of the functions, which all ranks must have alike.
    """
    found: list[Constant] = []
    pairs = zip(extracted.variables, extracted.graph.weights, strict=True)
    changing = {id(variable) for variable, facts in pairs if facts.stateful}
    changing |= {id(weight) for weight in in_parts(model.trainable_variables)}

    def others(rank: int, own: Any = None) -> list[Any]:
        return wholes(
            row.variable
            for row in table.rows
            if id(row.variable) in changing or (row.ranks and rank not in row.ranks)
            if row.variable is not own
        )

    def tried(
        what: str, weights: Sequence[Any], function: Any, given: Any, advice: str
    ) -> set[int]:
        constants, kept = _tried_alone(what, weights, function, given, advice)
        found.extend(constants)
        return kept

    loss, metrics = compiled_loss(model), compiled_metrics(model)
    if loss is not None and not all(map(made_by_keras, losses_of_outputs(loss))):
        advice = "Add what follows from weights with `add_loss`, in a layer that has them."
        tried("The loss", others(last_rank), SecondLoss(loss), given, advice)
    if metrics is not None and not all(map(made_by_keras, metrics.metrics)):
        advice = "Report what follows from weights in a callback, after `get_weights()`."
        tried("A metric", others(last_rank), metrics.update_state, given, advice)
    trainers: dict[int, int] = {}  # of the weight whose constraint has written something
    for weight in model.trainable_variables:
        mine = table[weight]
        if (regularizer := weight.regularizer) is not None and not made_by_keras(regularizer):
            advice = "Add what follows from both with `add_loss`, in a layer that has both."
            what = f"The regularizer of '{weight.path}'"
            if tried(what, others(mine.owner, weight), regularizer, (weight,), advice):
                raise UnsupportedModelError(
                    f"{what} writes a variable or draws random numbers. It runs for the loss and "
                    "for its gradient, on each rank that needs them, and not once for each batch. "
                    "Let it be a function of the weight alone, or change what it needs in a "
                    "callback, on all ranks."
                )
        if (constraint := weight.constraint) is not None and not made_by_keras(constraint):
            far = [r.variable for r in table.rows if r.ranks and r.trainer != mine.trainer]
            advice = "Use num_stages=1 without shard_optimizer."
            what = f"The constraint of '{weight.path}'"
            for key in tried(what, far, constraint, (weight,), advice):
                if trainers.setdefault(key, mine.trainer) != mine.trainer:
                    raise UnsupportedModelError(
                        f"{what} writes a variable, or draws from a generator, of a weight's that "
                        "another rank trains. Make a constraint with its own for each layer."
                    )
    return found


def _tried_alone(
    what: str, weights: Sequence[Any], function: Callable[..., Any], given: Any, advice: str
) -> tuple[list[Constant], set[int]]:
    """Refuses a function that reads some weights, which stand-ins show.

    Returns its constants, and by `id` the variables that it writes.
    """
    found, written = list[Any](), set[int]()
    own = [one for one in keras.tree.flatten(given) if isinstance(one, keras.Variable)]

    def trace() -> None:
        known = [*weights, *own]
        values = [tf.compat.v1.placeholder(w.dtype, tuple(w.shape)) for w in known]
        pairs = list(zip(known, values, strict=True))
        arguments = keras.tree.map_structure(_placeholder, given)
        # Whatever it says to what has no values, it says to the first batch, too.
        with contextlib.suppress(Exception), keras.StatelessScope(state_mapping=pairs) as scope:
            function(*arguments)
        found.extend(weight for weight, value in pairs[: len(weights)] if value.consumers())
        before = {id(weight): value for weight, value in pairs}
        state = scope.state_mapping.items()
        written.update(key for key, value in state if value is not before.get(key))

    traced, again = (tf.function(trace, autograph=False).get_concrete_function() for _ in "12")
    if found:
        raise UnsupportedModelError(
            f"{what} reads weight '{found[0].path}' past the model's layers, where stages and "
            f"replicas would not train as one process does. {advice}"
        )
    constants, others = (list(constants_of(one, lambda _: what)) for one in (traced, again))
    if [number for _, number in constants] != [number for _, number in others]:
        raise UnsupportedModelError(
            f"{what} draws random numbers of Python or NumPy, or counts in Python, when it is "
            "traced, so each trace would compute something else. Draw them once, when it is made."
        )
    refuse_kept(traced, lambda _: what)
    handles = {inner.op.name: id(outer) for outer, inner in traced.graph.captures}
    effects = effects_of(traced.graph.as_graph_def())
    written.update(handles.get(effect.argument or "", 0) for effect in effects)
    return constants, written


def _placeholder(described: Any) -> Any:
    is_tensor = isinstance(described, keras.KerasTensor)
    return tf.compat.v1.placeholder(described.dtype, described.shape) if is_tensor else described
