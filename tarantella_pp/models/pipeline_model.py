"""`PipelineModel`: a Keras model whose layers are spread over pipeline stages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, checked_count
from tarantella_pp.internals.functional import adopt_layers, sublayers
from tarantella_pp.internals.optimizers import with_loss_scaling
from tarantella_pp.internals.parted import in_parts
from tarantella_pp.internals.state import compiled_with, forget_functions
from tarantella_pp.internals.training import compile_loss
from tarantella_pp.models import model_validation
from tarantella_pp.models.agreed_plan import agreed_plan
from tarantella_pp.models.collective_model import CollectiveModel
from tarantella_pp.models.deferred_init import deferred_init, initial_values, initialize_beside
from tarantella_pp.models.training_loops import TrainingLoops, surrounded
from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.options import PlanOptions, Recompute
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.runtime.comm.collective import collective, compiled_facts, digest
from tarantella_pp.runtime.comm.communicator import world
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.engine import Engine
from tarantella_pp.runtime.weights.optimizer_state import OptimizerState
from tarantella_pp.runtime.weights.rank_weights import PlacedModel
from tarantella_pp.schedule import Schedule, read_schedule


class PipelineModel(TrainingLoops, CollectiveModel):
    """Trains a Keras model as a pipeline of stages, one or more on each MPI rank.

    Wrap a Functional or Sequential model, launch the script on as many ranks as there are stages
    and use it like any Keras model: `compile`, `fit`, `evaluate`, `predict`, `save`, callbacks and
    all kinds of data. The numbers equal the wrapped model's in one process, whatever the
    number of stages, ranks and micro-batches; only batch statistics (BatchNormalization) see a
    micro-batch instead of the batch. In one process, not started by MPI, that process owns all
    stages. All ranks must make the same calls: `fit`, `evaluate`, `predict`, `save` and
    `get_weights` are collective. Only rank 0 reads data, only the last rank prints.

    If the model is compiled, so is the pipeline, with the same optimizer, loss and metrics; on
    several ranks each leaves the optimizer with the state of its own weights, so that the wrapped
    model itself cannot be trained any more.

    Args:
        model: The Functional or Sequential model. It is neither copied nor changed, but its
            layers hold the weights that are trained. Or a function without
            arguments that builds a model, which is called under `deferred_init()`: no rank ever
            has more weights than its own stages have.
        num_stages: Number of pipeline stages. Default: as a schedule of your own or several memory
            limits say, or in one process 1; otherwise stages x replicas with which a step of
            `batch_size` samples is fastest within the limit, by simulation on a machine like one
            core, or a GPU. `print(model.plan)` shows the choice.
        num_micro_batches: Number of micro-batches that each batch is cut into. Their gradients
            are added up before the optimizer step (gradient accumulation). Default: the fastest.
        schedule: `"gpipe"`, `"1f1b"`, `"eager-1f1b"`, `"interleaved"`, `"zb-h1"`, `"zb-v"`,
            `"v-half"`, `"v-min"`, `"zb-auto"`, searched for with the costs of the plan, or a
            schedule of your own: a `schedule.Schedule` or the path of a text file with one.
            Default: the fastest, see `make_plan`; `"gpipe"` where the loss cannot be computed one
            micro-batch at a time.
        balance: What the stages are balanced by: `"memory"`; `"time"`, for which rank 0 measures
            each operation while the others wait; or `"flops"`. Default: the one with which a step
            is fastest within the limit.
        memory_limit: Largest memory of a stage, in bytes or as in `"16GB"`, one or one for each
            stage. Default: what a rank may take of the memory of its host, or of the control
            group of the job. If no plan keeps that, a warning says by how much.
        batch_size: Batch size, of all replicas, to plan for. Default: 32, Keras' own. Training
            takes any for which no stage needs more than `memory_limit`.
        recompute: Activation checkpointing: stages that keep only the inputs of a micro-batch, and
            of long stages the tensors between their parts, and repeat the rest in the backward
            pass, part by part: `"all"` or their numbers. Other stages repeat what costs little
            (Jain et al., "Checkmate", 2020); none does with `"none"`, which keeps all that
            gradients read. The numbers are the same, bit for bit. Default: as few operations as
            the limit needs, chosen for each stage.
        plan: A `Plan` or the path of one, which says all but `check_replicas`.
        wire_dtype: `"bfloat16"` to halve what travels from rank to rank: floating point
            activations and gradients are rounded to its 8 bits of precision, and the numbers are
            no longer exact. Default: their own type.
        num_replicas: Number of pipelines side by side, which share every batch (data parallelism).
            Default: the ranks left for each stage, or chosen with `num_stages`.
        shard_optimizer: Whether each replica keeps the optimizer state of its share of the weights
            only, updates these, and sends them to the others (ZeRO-1, Rajbhandari et al. 2020).
            The numbers are the same. Default: every replica keeps all.
        gradient_dtype: `"bfloat16"` to halve what replicas send each other of float32 gradients:
            each is rounded to 8 bits of precision, added up in float32, and the sum rounded again,
            so the numbers are no longer exact. Default: their own type.
        check_replicas: After how many steps the weights of all replicas are compared, by a hash. A
            `ReplicaError` names the first that differs. Default: never.

    Raises:
        ConfigurationError: If an option cannot work, alone or with the number of ranks.
        ScheduleError: If there is no such schedule, or it does not fit these stages and ranks.
        UnsupportedModelError: If the model cannot be cut into stages.
        PlanError: If `plan` belongs to another model, or no plan meets `memory_limit`.

    Example::

        model = tnt.PipelineModel(keras_model, num_stages=4)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=64, epochs=10)
    """

    _engine: Engine

    def __init__(
        self,
        model: keras.Model,
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
        schedule: str | Path | Schedule | None = None,
        balance: str | None = None,
        memory_limit: int | str | Sequence[int | str] | None = None,
        batch_size: int = 32,
        recompute: Recompute | None = None,
        plan: Plan | str | Path | None = None,
        wire_dtype: str | None = None,
        num_replicas: int | None = None,
        shard_optimizer: bool = False,
        check_replicas: int | None = None,
        gradient_dtype: str | None = None,
    ) -> None:
        model_validation.check_backend()
        if not isinstance(model, keras.Model) and callable(model):
            with deferred_init():
                model = model()
        model_validation.check_model(model)
        model_validation.check_strategy(model)
        model_validation.check_subclass(type(self), PipelineModel)
        if check_replicas is not None:
            check_replicas = checked_count("check_replicas", check_replicas)
        communicator = world()
        model_validation.check_deferred(model, balance)
        extracted = extract(model)
        read_schedule(schedule or "1f1b")  # refuses a wrong one on all ranks
        options = PlanOptions(
            num_stages=num_stages, num_micro_batches=num_micro_batches, schedule=schedule,
            balance=balance, memory_limit=memory_limit, batch_size=batch_size,
            recompute=recompute, num_replicas=num_replicas, shard_optimizer=shard_optimizer,
            gradient_dtype=gradient_dtype, wire_dtype=wire_dtype,
        )  # fmt: skip
        facts = {**vars(options), "plan": plan is not None}
        facts |= {"check_replicas": check_replicas, "compiled model": model.compiled}
        facts |= {"initial values": initial_values(model)}
        with communicator.call("PipelineModel", **facts):
            agreed, extracted = agreed_plan(extracted, communicator, options, plan)
            replicas = model_validation.replicas_of(
                agreed.num_stages, communicator.size, agreed.num_replicas
            )
            replicas = replicas if communicator.size > 1 else 1
            groups = ProcessGroups.of(communicator, replicas, agreed.placement)
            placed = PlacedModel(extracted, agreed, groups)
            model_validation.check_micro_batches(extracted, placed.num_micro_batches)
            super().__init__(extracted.inputs_struct, extracted.outputs_struct, name=model.name)
            adopt_layers(self, model)
            self.output_names = getattr(model, "output_names", None)  # by which losses are named
            self.dtype_policy = model.dtype_policy
            if not model.trainable:
                self._freeze_whole(model)
            free = plan is None and schedule is None
            self._engine = Engine(self, placed, free_schedule=free, check_every=check_replicas)
            self._engine.weights.start_alike()
            initialize_beside(model)
        if model.compiled:
            self._compile_like(model)

    def _freeze_whole(self, model: keras.Model) -> None:
        """Takes over the flag of a model that is frozen as a whole; its layers keep their own."""
        flags = [(layer, layer.trainable) for layer in sublayers(model)]
        self.trainable = False
        for layer, flag in flags:
            layer.trainable = flag

    def _compile_like(self, model: keras.Model) -> None:
        model.reset_metrics()  # Keras' `fit` does not at first, of metrics that are not its own
        PipelineModel.compile.__wrapped__(self, **compiled_with(model))  # type: ignore[attr-defined]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers of the wrapped model, as it lists them itself."""
        if "_engine" not in self.__dict__:  # Keras asks for them while it makes this model
            return list(super().layers)
        return list(self._wrapped.layers)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the summary of the wrapped model."""
        self._wrapped.summary(*args, **kwargs)

    @property
    def distribute_strategy(self) -> Any:
        """TensorFlow's default strategy; Keras' loops ask for it before they read data."""
        model_validation.check_strategy(self)
        return super().distribute_strategy

    @property
    def plan(self) -> Plan:
        """The plan in force; `print(model.plan)` shows it as a table."""
        return self._engine.plan

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Runs the whole model, where this rank has all of it: replicas infer alone."""
        ranks = self._engine.groups.pipeline.size
        if ranks > 1:
            raise ConfigurationError(
                f"The weights of '{self.name}' are on {ranks} ranks: "
                "no rank can call the model alone. Use `predict`, `train_on_batch` and the like "
                "on all ranks."
            )
        if training and self._engine.groups.num_replicas > 1:
            raise ConfigurationError(
                f"Called with `training=True` on one rank, '{self.name}' would part from its "
                "replicas. Use `fit` or `train_on_batch` on all ranks."
            )
        return super().call(inputs, training=training, mask=mask)

    @surrounded
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training; takes what `compile` of the wrapped model takes, as Keras' own does.

        As in plain Keras it is what makes a change of `trainable` take effect. What is refused
        changes nothing.

        `run_eagerly` and `jit_compile` change nothing, and are warned of.

        Raises:
            ConfigurationError: If an option would be wrong, or be wrong on several ranks, or the
                loss needs the outputs of the whole batch before the schedule has them.
            PlanError: If a stage needs more than `memory_limit` for a batch of `batch_size`, with
                what loss and metrics hold of the outputs.
        """
        model_validation.check_strategy(self)
        given = inspect.signature(keras.Model.compile).bind(self, *args, **kwargs)
        given.apply_defaults()
        optimizer = keras.optimizers.get(given.arguments["optimizer"])
        if given.arguments["auto_scale_loss"]:
            optimizer = with_loss_scaling(optimizer, self.dtype_policy.name)
        given.arguments["optimizer"] = optimizer
        if not self.trainable:  # Keras trains nothing then, of layers that were set free again, too
            for variable in self.variables:
                variable.trainable = False
        compiled = compile_loss(self, given.arguments["loss"], given.arguments["loss_weights"])
        metrics = [given.arguments[name] for name in ("metrics", "weighted_metrics")]
        self._engine.refuse_compilation(optimizer, compiled, metrics != [None, None])
        facts = compiled_facts(given.arguments)
        trained = [bool(variable.trainable) for variable in self.variables]
        facts["trainable"] = f"{sum(trained)} of {len(trained)} variables, {digest([trained])}"
        with self._engine.communicator.call("compile", **facts):
            state = self._divided(optimizer)  # before Keras compiles: what fails changes nothing
            super().compile(*given.args[1:], **given.kwargs)
            self._optimizer_state = state
            self._renew()
        if self._engine.communicator.prints:
            micro_batches = self._engine.placed.num_micro_batches
            model_validation.warn_of_batch_statistics(self._engine.extracted, micro_batches)
            model_validation.warn_of_compilation(given.arguments, stacklevel=4)

    def _divided(self, optimizer: Any) -> OptimizerState | None:
        """Leaves an optimizer with this rank's share of its slots; all ranks must call it."""
        if optimizer is None:
            return None
        weights, table = in_parts(self.trainable_variables), self._engine.weights.table
        # By the time it publishes, `compile` has made another engine.
        return OptimizerState(optimizer, weights, table, lambda: self._engine.weights.publish())

    def _renew(self) -> None:
        """Makes changes of layers, loss, metrics and optimizer take effect."""
        self._engine = self._engine.up_to_date()
        self._engine.forget_compilation()

    def _see_flags(self, state: OptimizerState) -> None:
        """Takes in layers that were frozen or set free after `compile`, as Keras does here."""
        if not state.serves(in_parts(self.trainable_variables)):
            self._optimizer_state = self._divided(self.optimizer)
            self._renew()

    def make_train_function(self, force: bool = False) -> None:
        """Builds this rank's training step; called by Keras' own loops."""
        model_validation.check_optimizer(self)
        if force:
            self._renew()
        if self._optimizer_state is not None:
            if self.train_function is None and not self.optimizer.built:
                self._see_flags(self._optimizer_state)
            self._optimizer_state.build()
        if self._engine.communicator.size > 1:
            # Functions of the wrapped model, once traced, would read stale weights without asking.
            forget_functions(self._wrapped)
        super().make_train_function(force)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Updates the compiled metrics, for loops of your own in one process."""
        super().compute_metrics(x, y, y_pred, sample_weight)
        return dict(keras.Model.get_metrics_result(self))

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the logs of the last step, or of none since a reset, the same on every rank."""
        if self._engine.logs:
            return dict(self._engine.logs)
        found: dict[str, Any] = {}
        for name, result in super().get_metrics_result().items():  # some are dicts, flat in logs
            found |= result if isinstance(result, dict) else {name: result}
        return found

    def _get_metrics_result_or_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns the logs of an epoch: those restored where no step of it was left to train."""
        if not logs:
            return dict(self._engine.logs)
        return super()._get_metrics_result_or_logs(logs)  # type: ignore[no-any-return]

    @collective()
    def reset_metrics(self) -> None:
        """Makes all metrics begin anew, as Keras does before each epoch; all ranks must call it."""
        super().reset_metrics()
        self._engine.logs = {}


# Not as a decorator: documentation is made without Keras.
keras.saving.register_keras_serializable("tarantella_pp")(PipelineModel)
