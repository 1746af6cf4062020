"""The parts of a run: data and plan, devices, model, optimizer and step.

A job does not change during a run. Every program that makes, repeats or replays steps of a run
begins with `open_job`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from data_pipeline.base.errors import ConfigError
from data_pipeline.loader.loader import EvaluationData, HostBatch, TrainingData, carry_errors
from data_pipeline.plan.plan import BatchShape
from data_pipeline.shards.teacher_logits import TeacherFiles
from maxtrain.checkpoint.run_state import RunState
from maxtrain.config import (
    RunConfig,
    fewer_settings,
    fit_to_devices,
    fit_to_fewer,
    fit_to_planned,
    leaves,
    with_accumulation,
)
from maxtrain.config.across.attention_choice import Hardware, KernelChoice, choose
from maxtrain.config.across.rows import row_lengths
from maxtrain.config.across.steps import fit_warmup
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.run_path import run_path
from maxtrain.config.schema import LossScaleConfig
from maxtrain.config.sections.mesh import num_slices
from maxtrain.config.sections.moe import WITH_EXPERTS
from maxtrain.models.adapt import split_adapters
from maxtrain.models.init import learning_rate_factors
from maxtrain.models.registry import build_model
from maxtrain.objectives.objective import (
    POLICY,
    REFERENCE,
    REFERENCE_SUM,
    Batch,
    Objective,
)
from maxtrain.objectives.registry import ObjectiveSettings, make_objective
from maxtrain.observe.launches import usual_devices, version_of
from maxtrain.observe.metrics import require_free_names
from maxtrain.ops.digest import digests
from maxtrain.ops.finite import non_finite_names
from maxtrain.ops.quantity import Metric
from maxtrain.ops.tokamax import require_attention, require_products
from maxtrain.parallel import distributed
from maxtrain.parallel.batches import BatchLayout, abstract_batch, prefetch
from maxtrain.parallel.hardware import hardware_of
from maxtrain.parallel.host_memory import require_host_memory
from maxtrain.parallel.memory import bytes_on_device, bytes_on_host
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import stored_rules
from maxtrain.rl.prompts import require_prompts, require_room
from maxtrain.storage.reading import readable_model
from maxtrain.train_step.layer_updates import LayerUpdates, make_layer_updates
from maxtrain.train_step.loss_scale import resolve
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import (
    TrainState,
    abstract_model,
    abstract_state,
    create_state,
    on_hosts,
    policy_params,
    policy_variables,
    saved_part,
    shardings,
    state_from_variables,
    with_frozen,
)
from maxtrain.train_step.step import Metrics, make_train_step
from maxtrain.train_step.trainable import frozen_paths, join, split, split_buffers
from maxtrain.trainer.data import (
    attach_stored_teacher,
    have_end_marks,
    open_data,
    require_answers,
    with_vocabulary,
)
from maxtrain.trainer.reference_model import FrozenModel, find_for, find_reference
from maxtrain.weights.sample import sampled_hash
from maxtrain.weights.start import (
    require_same_meaning,
    require_same_tokenizer,
    require_weights,
    split_score,
    split_value,
    starting_variables,
)

# The key under which a run keeps the number chosen for optimizer.accumulation=auto; see
# auto_accumulation.py.
ACCUMULATION = "optimizer.accumulation"


@dataclasses.dataclass(frozen=True)
class TrainingParts:
    """The model, objective and optimizer of a run, and their mesh, without the data. Use it inside
    `jax.set_mesh(parts.mesh)`."""

    # The config with the mesh filled in for these devices, and the attention kernel chosen.
    config: RunConfig
    attention: KernelChoice
    mesh: jax.sharding.Mesh
    num_steps: int
    # The structure of each model by its role; "policy" is the one that trains.
    graphdefs: dict[str, nnx.GraphDef | None]
    objective: Objective
    optimizer: optax.GradientTransformation
    loss_scale: LossScaleConfig | None
    abstract: TrainState
    # The optimizer in two parts, if optimizer.on_host keeps its arrays on the hosts.
    layer_updates: LayerUpdates | None
    # The metrics that the policy's layers record.
    of_layers: tuple[Metric, ...]
    # The model whose parameters are in `TrainState.frozen`; None: there is none.
    frozen_model: FrozenModel | None
    # The reference model whose stored log-probabilities come with the batches. It is not part of
    # the state. None: there is none, or it is the policy without its adapters.
    stored_reference: FrozenModel | None

    @property
    def other_model(self) -> FrozenModel | None:
        """Return the model that the objective needs beside the one that trains."""
        return self.frozen_model or self.stored_reference

    @property
    def reads_reference(self) -> bool:
        """Return whether batches need the log-probabilities that `StoredReference` attaches."""
        return REFERENCE_SUM in self.objective.arrays

    @property
    def policy_graphdef(self) -> nnx.GraphDef:
        """Return the structure of the model that trains."""
        graphdef = self.graphdefs[POLICY]
        assert graphdef is not None
        return graphdef

    @property
    def recorded(self) -> tuple[Metric, ...]:
        """List the metrics of a step beside the loss, of the objective and of the layers."""
        return (*self.objective.recorded, *self.of_layers)

    @property
    def units(self) -> dict[str, str]:
        """Return the unit of each metric beside the loss, by name."""
        quantities = (*self.recorded, *self.objective.evaluated)
        return {quantity.name: quantity.unit for quantity in quantities}

    def initial_state(
        self,
        tell: Callable[[str], object] = lambda table: None,
        frozen: nnx.State | None = None,
    ) -> TrainState:
        """Create the state before the first step.

        Args:
            tell: called with a table of the tensors that were read, if checkpoint.init_from names
                weights; otherwise the weights are random.
            frozen: as for `with_frozen_model`.
        """
        config = self.config
        if config.checkpoint.init_from is None:
            state = self._random_state()
            bad = non_finite_names({"params": policy_variables(state)})
            if bad:
                fix = "Lower init.scale or init.std"
                raise ConfigError(
                    f"init: the initial weights are not finite, first those of {bad[0]}. {fix}."
                )
            return self.with_frozen_model(state, frozen)

        def random_variables() -> nnx.State:
            return split_value(policy_variables(self._random_state()))[1]

        def adapters_of(variables: nnx.State) -> nnx.State:
            return split_adapters(variables)[1]

        def score_of(variables: nnx.State) -> nnx.State:
            return split_score(variables)[0]

        def value_of(variables: nnx.State) -> nnx.State:
            return split_value(variables)[0]

        fresh_adapters = None
        if config.model.lora.rank is not None:
            fresh_adapters = functools.partial(self._random_part, adapters_of)
        # A value head always starts anew, since it belongs to one task and its rewards.
        variables = starting_variables(
            split_value(policy_variables(self.abstract))[1],
            config.checkpoint,
            dataclasses.replace(config.model, value=False),
            random_variables,
            tell,
            fresh_adapters,
            config.precision,
            functools.partial(self._random_part, score_of),
        )
        if config.model.value:
            variables = join(variables, self._random_part(value_of))
        abstract = saved_part(self.abstract)
        state = state_from_variables(abstract, variables, self.optimizer, self.loss_scale)
        return self.with_frozen_model(state, frozen)

    def with_frozen_model(self, state: TrainState, frozen: nnx.State | None = None) -> TrainState:
        """Add the frozen model, which checkpoints do not hold, to a restored or new state.

        `frozen`: the parameters of the frozen model; None: read them from its directory.
        """
        if self.frozen_model is None:
            return state
        role = self.frozen_model.role
        if frozen is None:
            frozen = self.frozen_model.load(self.abstract.frozen[role])
        return with_frozen(state, {role: frozen})

    @property
    def _init_seed(self) -> int:
        """Return the seed of the initial weights."""
        if self.config.init.seed is None:
            return self.config.seed
        return self.config.init.seed

    def _random_state(self) -> TrainState:
        """Create a state with random weights."""
        config = self.config
        return create_state(
            saved_part(self.abstract),
            config.model,
            config.precision,
            self.optimizer,
            self._init_seed,
            self.loss_scale,
            config.init,
        )

    def _random_part(self, part: Callable[[nnx.State], nnx.State]) -> nnx.State:
        """Create new values of one part of the variables only.

        `part`: selects that part from all variables.
        """
        config = self.config
        abstract = part(policy_variables(self.abstract))

        def create(key: jax.Array) -> nnx.State:
            model = build_model(config.model, config.precision, key, config.init)
            return part(nnx.state(model))

        program = jax.jit(create, out_shardings=shardings(abstract))
        return program(jax.random.key(self._init_seed))

    def hashes(self, state: TrainState, batch: Batch) -> Metrics:
        """Compute digests of parameters with buffers, and of the batch, for the metrics of the step
        that made this state."""
        return {"params_hash": digests(policy_variables(state)), "batch_hash": digests(batch)}

    def make_step(self) -> jax.stages.Wrapped:
        """Build the jitted step (state, batch) -> (state, metrics)."""
        config = self.config
        rate = make_schedule(config.schedule, config.optimizer.learning_rate, self.num_steps)
        return make_train_step(
            self.abstract,
            self.graphdefs,
            self.objective,
            self.optimizer,
            rate,
            config.optimizer.micro_batches,
            seed=config.seed,
            accumulate=config.precision.accumulate,
            loss_scale=self.loss_scale,
            stochastic_rounding=config.optimizer.stochastic_rounding,
            zero=config.optimizer.zero,
            anomaly=config.anomaly,
            norms_interval=config.observe.layer_norms_interval,
            layer_updates=self.layer_updates,
        )


@dataclasses.dataclass(frozen=True)
class Job(TrainingParts):
    """The parts of a run with its data."""

    # The config as requested, with the data's vocabulary and a warmup that fits the plan, but not
    # fitted to these devices. It works on other machines.
    requested: RunConfig
    data: TrainingData
    sets: dict[str, EvaluationData]
    # The number chosen for ACCUMULATION.
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Notes on the config for the log, a line each.
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def layouts(self) -> dict[tuple[int, int], BatchLayout]:
        """Return how batches lie on the mesh, for each batch shape."""
        return {shape: BatchLayout(self.mesh, *shape) for shape in self.data.shapes()}

    def abstract_batch(self, shape: BatchShape) -> dict[str, jax.ShapeDtypeStruct]:
        """Return a batch of this shape as abstract arrays, including the arrays that only the data
        provides."""
        arrays = dict.fromkeys(self.data.numbers, "BT") | dict(self.objective.arrays)
        return abstract_batch(self.mesh, shape.batch_size, shape.seq_length, arrays)

    def largest_shapes(self, start: int) -> list[BatchShape]:
        """Return the largest batch shapes from step `start` on. Empty for on-policy training, where
        the number of rows is only known at each step."""
        if rollout_settings(self.config) is not None:
            return []
        return self.data.largest_shapes(start)

    def layout(self, step: int) -> BatchLayout:
        """Return how the batch of a step lies on the mesh."""
        return self.layouts[self.data.shape_at(step)]

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes that the run keeps on each device between steps, by name."""
        held = {
            "parameters": bytes_on_device(policy_params(self.abstract)),
            "optimizer state": bytes_on_device(self.abstract.opt_state),
        }
        if self.config.train.on_host != "none":
            held["parameters on its host"] = bytes_on_host(policy_params(self.abstract))
        if self.config.optimizer.on_host:
            held["optimizer state on its host"] = bytes_on_host(self.abstract.opt_state)
        if self.frozen_model is not None:
            role = self.frozen_model.role
            held[role] = bytes_on_device(self.abstract.frozen[role])
            if self.config.train.on_host != "none":
                held[f"{role} on its host"] = bytes_on_host(self.abstract.frozen[role])
        if rollout_settings(self.config) is None:
            # The rows of batches made from rollouts are not known yet.
            held["batch"] = bytes_on_device(self.abstract_batch(self.data.shape_at(0)))
        return held

    def batches(
        self, start: int, stop: int | None = None, left_out: frozenset[int] = frozenset()
    ) -> Iterator[tuple[Batch, HostBatch]]:
        """Iterate over the batches from `start` up to `stop` (None: the plan's end), on the
        devices, each with its host batch without arrays.

        Batches of the steps in `left_out` have no targets, so that those steps change nothing. A
        read error is raised after the batches before it. With several processes, the batches from
        there on are empty and carry the error as `error` instead.
        """

        def place(batch: HostBatch) -> tuple[Batch, HostBatch]:
            arrays = batch.arrays
            if batch.step in left_out:
                arrays = arrays | {"loss_mask": np.zeros_like(arrays["loss_mask"])}
            return self.layout(batch.step).to_global(arrays), batch._replace(arrays={})

        if stop is None:
            stop = self.data.plan.num_steps
        parts = {shape: layout.part for shape, layout in self.layouts.items()}
        host = self.data.iterate(start, parts, stop)
        if jax.process_count() > 1:
            numbers = self.data.numbers
            host = carry_errors(
                host,
                range(start, stop),
                lambda step: self.layout(step).part,
                numbers,
                self.data.teacher,
            )
        return prefetch(map(place, host), self.config.data.prefetch)


def open_job(config: RunConfig, saved: RunState | None, as_launched: bool = False) -> Job:
    """Open the data, then start the devices.

    Args:
        saved: the run at the checkpoint to resume from, if there is one.
        as_launched: whether the config is that of a recorded launch, which is used unchanged with
            any number of processes.

    Raises:
        UserError: data, config and devices do not fit together.
    """
    kept: dict[str, Any] = {}
    if saved is not None:
        kept = dict(saved.kept)
    _require_weights_to_start(config, saved)
    data, sets = open_data(config, saved)
    require_answers(config, data, sets)
    attach_stored_teacher(config, data, sets)
    settings = rollout_settings(config)
    if settings is not None:
        longest = settings.max_completion_length
        require_prompts(data, config.objective, longest)
        for name, eval_set in sets.items():
            if eval_set.shards.has_columns:
                length = eval_set.config.seq_length
                key = f"eval.sets.{name}"
                require_room(key, eval_set.shards, length, config.objective, longest)
    requested = with_vocabulary(config, data.vocab_size)
    num_steps = data.plan.num_steps
    notes: list[str] = []
    if not as_launched:
        require_same_meaning(requested.model, saved)
        requested, of_warmup = _with_warmup_of_plan(requested, num_steps)
        requested, of_accumulation = _with_kept_accumulation(requested, kept)
        notes = [note for note in (of_warmup, of_accumulation) if note]
    before_fewer = requested
    run_dir = run_path(config)

    def suffices(had: int, count: int) -> bool:
        slices = num_slices(config.mesh)
        # Which processes form a slice is not known yet. If each process is a slice, all slices are
        # complete.
        if slices not in (1, had):
            return False
        usual = usual_devices(run_dir, config.mesh.simulated_devices)
        return fit_to_fewer(before_fewer, had, count, usual) is not None

    mesh = config.mesh
    if as_launched:
        # Accumulation stays as it was with the processes of that launch.
        mesh = dataclasses.replace(mesh, min_processes=None, planned_processes=None)
    cache = config.observe.compilation_cache
    had = distributed.start(mesh, cache, config.determinism == "full", suffices)
    count = jax.process_count()
    requested, of_fewer = _with_fewer(requested, had, count)
    if of_fewer:
        notes.append(of_fewer)
    fitted = fit_to_devices(requested, jax.device_count())
    had = None
    if saved is not None:
        had = saved.attention()
    parts = make_parts(
        fitted, jax.devices(), num_steps, len(data.plan.names), had, have_end_marks(data)
    )
    for stored in _stored_teachers(data, sets):
        stored.require_vocabulary(fitted.model.vocab_size or 0)
    if fitted.checkpoint.init_from is not None:
        require_same_tokenizer(fitted.checkpoint, data.shards[0])
    other = parts.other_model
    if other is not None:
        other.require_same_tokenizer(data.shards[0].manifest.tokenizer["sha256"])
        other.require_length(max(row_lengths(fitted).values()))
    return Job(
        **vars(parts), requested=requested, data=data, sets=sets, kept=kept, notes=tuple(notes)
    )


def _require_weights_to_start(config: RunConfig, saved: RunState | None) -> None:
    """Raise an error if a new run starts from missing weights, before its data is opened."""
    if saved is None and config.checkpoint.init_from is not None:
        require_weights(config.checkpoint)


def _stored_teachers(
    data: TrainingData, sets: Mapping[str, EvaluationData]
) -> Iterator[TeacherFiles]:
    """Iterate over the stored teacher logits of the data and the sets."""
    for read in (data, *sets.values()):
        if read.teacher is not None:
            yield read.teacher


def _with_fewer(config: RunConfig, had: int, count: int) -> tuple[RunConfig, str]:
    """Fit the config to the present processes, if it is meant for more, and describe the changes in
    a line. No device gets more rows at a time than before.

    Args:
        had: number of processes that the config is meant for.
        count: number of processes that are present.
    """
    if count >= had:
        return config, ""
    devices = jax.device_count() // count
    if config.mesh.planned_processes == had:
        fewer = fit_to_planned(config, count, devices)
    else:
        # The decision to continue was made before devices could be counted.
        fewer = fit_to_fewer(config, had, count, devices) or config
    settings = fewer_settings(config, fewer)
    settings.pop("mesh.planned_processes", None)
    if fewer.optimizer.accumulation == config.optimizer.accumulation:
        settings.pop(ACCUMULATION)
    if not settings:
        return fewer, ""
    changes = ", ".join(f"{key}={value}" for key, value in settings.items())
    return fewer, f"processes: {count} of the {had} that the settings are meant for; so {changes}"


def _with_kept_accumulation(config: RunConfig, kept: dict[str, Any]) -> tuple[RunConfig, str]:
    """Return the config with the number chosen for optimizer.accumulation=auto before the
    checkpoint, and a log line about it."""
    count = kept.get(ACCUMULATION)
    if config.optimizer.accumulation != "auto" or count is None:
        return config, ""
    return with_accumulation(config, count), as_decided(count)


def as_decided(count: int) -> str:
    """Describe a number of micro-batches that an earlier launch chose."""
    return f"optimizer.accumulation={count}, as it was decided when the run began."


def _with_warmup_of_plan(config: RunConfig, num_steps: int) -> tuple[RunConfig, str]:
    """Return the config with a warmup that fits into the plan, and a line if the warmup was
    changed.

    With steps=N, reading the config fitted the warmup already. With steps=auto only the plan knows
    the number of steps.
    """
    was = config.schedule.warmup_steps
    if config.steps != "auto":
        return config, ""
    fitted = fit_warmup(config, num_steps)
    if fitted is config:
        return config, ""
    now = fitted.schedule.warmup_steps
    rule = f"schedule.warmup_steps={was} does not fit into the plan of {num_steps:,} steps"
    return fitted, f"warm-up: {rule} and is {now}. Set schedule.warmup_steps for another."


def _require_kernels(config: RunConfig, hardware: Hardware) -> None:
    """Raise an error if the kernels of a run need a missing package or other devices."""
    if config.model.family in WITH_EXPERTS and config.model.routing.kernel == "tokamax":
        require_products(hardware, config.precision.compute)
    if config.model.attention == "mosaic":
        require_attention()


def make_parts(
    config: RunConfig,
    devices: Sequence[Any],
    num_steps: int,
    num_sources: int,
    had: str | None = None,
    has_end_marks: bool = True,
) -> TrainingParts:
    """Build the parts of a run on these devices from shapes; nothing is computed.

    Args:
        config: of the run, fitted to the devices and with a known vocabulary.
        devices: present ones, or descriptions of devices elsewhere.
        num_steps: of the plan.
        num_sources: of the training data.
        had: as for `choose`.
        has_end_marks: as for `objectives.reward`.

    Raises:
        ConfigError: the mesh does not divide a dim, or the devices lack a kernel.
    """
    hardware = hardware_of(devices[0])
    attention = choose(hardware, config, had)
    model = dataclasses.replace(config.model, attention=attention.kernel)
    config = dataclasses.replace(config, model=model)
    _require_kernels(config, hardware)
    mesh = make_mesh(config.mesh, devices)
    rules = stored_rules(config.mesh.rules)
    objective = objective_of(config, num_sources, has_end_marks)
    frozen_model = find_for(objective, config)
    if frozen_model is not None:
        frozen_model = frozen_model.with_kernel(config, hardware)
    stored_reference = None
    if REFERENCE_SUM in objective.arrays:
        stored_reference = find_reference(config)
    if stored_reference is not None:
        stored_reference = stored_reference.with_kernel(config, hardware)
    for other in (frozen_model, stored_reference):
        if other is not None:
            other.require_same_tokens(config.model.vocab_size or 0)
    loss_scale = resolve(config.loss_scale, config.precision.compute)
    with jax.set_mesh(mesh):
        graphdef, variables = abstract_model(config.model, config.precision, mesh, rules)
        params, buffers = split_buffers(variables)
        trainable, frozen = split(params, frozen_paths(config.train, params))
        rule = "adam"
        if config.optimizer.name in ("sgd", "momentum", "nesterov"):
            rule = "sgd"
        factors = learning_rate_factors(trainable, config.init, config.model, rule)
        optimizer = make_optimizer(config.optimizer, config.schedule, num_steps, trainable, factors)
        zero = config.optimizer.zero
        on_host = config.optimizer.on_host
        layer_updates = None
        if on_host:
            require_host_memory(mesh, "optimizer.on_host=true", "optimizer.on_host=false")
            layer_updates = make_layer_updates(
                config.optimizer, config.schedule, num_steps, trainable, factors
            )
        weights = config.train.on_host
        if weights != "none":
            require_host_memory(mesh, f"train.on_host={weights}", "train.on_host=none")
        abstract = abstract_state(
            trainable, optimizer, mesh, loss_scale, zero, frozen, buffers, rules, on_host, weights
        )
        graphdefs: dict[str, nnx.GraphDef | None] = {POLICY: graphdef}
        if frozen_model is not None:
            structure, shapes = frozen_model.abstract(mesh, rules)
            if weights != "none":
                shapes = on_hosts(shapes, only_layers=True)
            graphdefs[frozen_model.role] = structure
            abstract = with_frozen(abstract, {frozen_model.role: shapes})
        elif REFERENCE in objective.models:
            graphdefs[REFERENCE] = None
        if weights != "none" and not bytes_on_host((policy_params(abstract), abstract.frozen)):
            raise ConfigError(
                f"train.on_host={weights} is for weights of repeated layers, and none of these "
                f"{'are frozen' if weights == 'frozen' else 'is there'}. Set train.on_host=none."
            )
        of_layers = nnx.merge(graphdef, variables).recorded()
        require_free_names((*objective.recorded, *of_layers, *objective.evaluated))
    return TrainingParts(
        config,
        attention,
        mesh,
        num_steps,
        graphdefs,
        objective,
        optimizer,
        loss_scale,
        abstract,
        layer_updates,
        of_layers,
        frozen_model,
        stored_reference,
    )


def objective_of(config: RunConfig, num_sources: int = 0, has_end_marks: bool = True) -> Objective:
    """Build the objective of a config.

    `num_sources`: of the data; 0: no losses by source, whatever the config says. `has_end_marks`:
    as for `objectives.reward`.
    """
    if not config.loss.by_source:
        num_sources = 0
    settings = ObjectiveSettings(
        config.loss,
        config.distill,
        config.dpo,
        config.reward,
        config.grpo,
        config.ppo,
        config.regularization,
        config.optimizer.normalize,
        num_sources,
        config.determinism == "full",
        has_end_marks,
    )
    return make_objective(config.objective, settings)


def launch_fields(job: Job, saved: RunState | None) -> dict[str, str]:
    """Return the settings that all processes must share before the first step, by name.

    Each host may keep the data in a different place.
    """
    mesh = r"mesh\.(coordinator|num_processes|process_id|simulated_devices|connect_seconds)"
    # observe.layer_norms_interval changes the compiled program, which must be the same everywhere.
    observe = r"observe\.(?!layer_norms_interval).*"
    places = r".*\.path|data\.cache(_bytes)?|local_dir|checkpoint\.local"
    own = re.compile(rf"{observe}|{mesh}|{places}")
    fields = {key: value for key, value in leaves(job.requested).items() if not own.fullmatch(key)}
    for name, eval_set in job.sets.items():
        fields[f"eval.sets.{name}"] = eval_set.manifest.uid
    for package in ("maxtrain", "jax", "jaxlib", "numpy", "grain"):
        fields[package] = version_of(package)
    fields["kernel of attention"] = job.attention.kernel
    fields["data"] = job.data.fingerprint_at(job.data.plan.num_steps)
    frozen = job.other_model
    if frozen is not None:
        fields[frozen.role] = f"step {frozen.step}, {frozen.function()}"
        if frozen.run is None:
            fields[f"files of the {frozen.role}"] = sampled_hash(frozen.directory)
    if job.data.teacher is not None:
        fields["stored teacher"] = job.data.teacher.digest()
    weights = readable_model(job.config.checkpoint.init_from or "")
    if saved is None and (weights / "config.json").exists():
        fields["files of checkpoint.init_from"] = sampled_hash(weights)
    fields["checkpoint"] = "none"
    if saved:
        fields["checkpoint"] = f"step {saved.step}"
    return fields
