"""All checks of a config that need neither a device nor data. Problems are collected in the order
in which they are reported, and never raised one by one.

What holds inside a section is beside its keys in `sections/`, what holds across sections in
`across/`, and which keys nothing reads is what their declarations say. What depends on the data, as
sources and stages do, is checked when its plan is solved (data_pipeline/plan/plan.py).
"""

from collections.abc import Iterator

from maxtrain.config.across import (
    attention,
    directories,
    evaluation,
    experts,
    rewards,
    rows,
    shapes,
    steps,
    updates,
)
from maxtrain.config.keys import all_keys
from maxtrain.config.paths import path_problems
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.run_path import url_problems
from maxtrain.config.schema import (
    DistillConfig,
    DpoConfig,
    GrpoConfig,
    PpoConfig,
    RewardConfig,
    RunConfig,
)
from maxtrain.config.sections.anomaly import window_problems
from maxtrain.config.sections.checkpoint import adapters_problems, fork_problems
from maxtrain.config.sections.distill import stored_problems, teacher_problems
from maxtrain.config.sections.dpo import (
    packing_problems,
    smoothing_problems,
    stored_reference_problems,
)
from maxtrain.config.sections.grpo import grpo_problems, prompt_problems
from maxtrain.config.sections.init import std_problems
from maxtrain.config.sections.lora import lora_problems
from maxtrain.config.sections.loss import probability_problems
from maxtrain.config.sections.mesh import axis_problems, process_problems
from maxtrain.config.sections.model import heads_problems, layer_type_problems, rope_problems
from maxtrain.config.sections.moe import expert_problems
from maxtrain.config.sections.observe import profile_problems, tracker_problems
from maxtrain.config.sections.optimizer import decay_problems, group_problems
from maxtrain.config.sections.ppo import value_problems
from maxtrain.config.sections.precision import activation_problems, loss_scale_problems
from maxtrain.config.sections.remat_names import kept_problems
from maxtrain.config.sections.rules import rule_problems
from maxtrain.config.sections.schedule import pieces_problems
from maxtrain.config.unused_keys import Problem, UnusedKey, idle_among, idle_keys


def problems_of(config: RunConfig) -> list[Problem]:
    """Every problem of a config whose values are inside their own types and ranges."""
    idle = idle_keys(config)
    problems = [
        *path_problems(config),
        *_of_evaluation_and_data(config, idle),
        *_of_the_model(config, idle),
        *_of_updates(config, idle),
        *_of_anomalies(config, idle),
        *_of_the_schedule(config, idle),
        *_of_devices(config, idle),
        *tracker_problems(config.observe),
        *updates.repeat_problems(config),
    ]
    # An idle key that has no place above, for example one that was declared only now, comes last.
    reported = [problem.key for problem in problems if isinstance(problem, UnusedKey)]
    return [*problems, *(found for found in idle if found.key not in reported)]


def _of_evaluation_and_data(config: RunConfig, idle: list[UnusedKey]) -> Iterator[Problem]:
    yield from directories.run_name_problems(config.run_name)
    yield from url_problems(config)
    yield from idle_among(idle, "eval_interval")
    yield from evaluation.batches_problems(config)
    yield from idle_among(idle, "eval.stop_patience", "eval.stop_set")
    yield from evaluation.early_stop_problems(config)
    yield from idle_among(idle, "observe.sample_interval", "eval_at_start")
    yield from profile_problems(config.observe)
    yield from evaluation.set_problems(config)
    yield from directories.source_problems(config)
    yield from directories.repeated_source_problems(config)
    yield from evaluation.repeated_set_problems(config)


def _of_the_model(config: RunConfig, idle: list[UnusedKey]) -> Iterator[Problem]:
    yield from heads_problems(config.model)
    yield from kept_problems(config.model.kept)
    yield from rope_problems(config.model)
    yield from layer_type_problems(config.model)
    yield from expert_problems(config.model.moe)
    yield from lora_problems(config.model.lora)
    yield from idle_among(idle, "checkpoint.init_from")
    yield from fork_problems(config.checkpoint)
    yield from adapters_problems(config.checkpoint)
    yield from rows.row_problems(config)
    yield from experts.balance_scope_problems(config)
    yield from experts.expert_kernel_problems(config)
    yield from attention.kernel_problems(config)
    yield from std_problems(config.init)
    yield from idle_among(idle, "init.std", by="init.name")
    yield from idle_among(idle, "checkpoint.init_partial")
    yield from idle_among(
        idle,
        "init.name",
        "init.std",
        "init.residual",
        "init.embedding_std",
        "init.scale",
        "init.seed",
        by="checkpoint.init_from",
    )
    yield from idle_among(idle, "init.mup_base_head_dim", "init.mup_base_depth")
    yield from updates.mup_depth_problems(config)
    yield from idle_among(idle, "checkpoint.copy_keep")
    yield from directories.copy_problems(config)


def _of_updates(config: RunConfig, idle: list[UnusedKey]) -> Iterator[Problem]:
    yield from _idle_in_section(idle, DistillConfig, "distill.")
    yield from teacher_problems(config.objective, config.distill)
    if config.objective == "distill":
        yield from stored_problems(config.distill, config.data)
    yield from _idle_in_section(idle, DpoConfig, "dpo.")
    yield from smoothing_problems(config.objective, config.dpo)
    yield from stored_reference_problems(config.objective, config.dpo, config.data)
    yield from packing_problems(config.objective, config.data)
    yield from _idle_in_section(idle, RewardConfig, "reward.")
    yield from idle_among(idle, "model.score")
    yield from rewards.score_problems(config)
    yield from _idle_in_section(idle, GrpoConfig, "grpo.")
    yield from grpo_problems(config.objective, config.grpo)
    settings = rollout_settings(config)
    if settings is not None:
        longest = settings.max_completion_length
        yield from prompt_problems(config.objective, longest, config.data)
    yield from _idle_in_section(idle, PpoConfig, "ppo.")
    yield from idle_among(idle, "model.value")
    yield from value_problems(config.objective, config.model.value)
    yield from updates.mean_problems(config)
    yield from idle_among(
        idle,
        "loss.adversarial_radius",
        "loss.adversarial_steps",
        "model.rope_factor",
        "model.rope_low_freq_factor",
        "model.rope_high_freq_factor",
        "model.rope_original_length",
        "model.rope.beta_fast",
        "model.rope.beta_slow",
        "model.rope.truncate",
        "model.rope.attention_factor",
        "model.rope.mscale",
        "model.rope.mscale_all_dim",
        "model.rope.short_factors",
        "model.rope.long_factors",
        "data.corruption.span",
        "data.corruption.token_id",
        "data.fill_patience",
        "data.on_long",
        "data.balance_rows",
        "data.balance_quadratic",
    )
    yield from probability_problems(config.regularization)
    yield from attention.dropout_problems(config)
    yield from decay_problems(config.optimizer)
    yield from idle_among(
        idle, "optimizer.momentum", "optimizer.beta1", "optimizer.beta2", "optimizer.eps"
    )
    yield from updates.pattern_problems(config)
    yield from group_problems(config.optimizer)
    yield from updates.moment_problems(config)
    yield from idle_among(idle, "optimizer.stochastic_rounding")
    yield from updates.mup_problems(config)
    yield from idle_among(idle, "optimizer.on_host")
    yield from updates.on_host_problems(config)
    yield from updates.weights_on_host_problems(config)
    yield from idle_among(idle, "optimizer.zero")


def _idle_in_section(idle: list[UnusedKey], section: type, prefix: str) -> list[UnusedKey]:
    """Return the unused keys that belong to a section, in the schema's order."""
    return idle_among(idle, *(key.path for key in all_keys(section, prefix)))


def _of_anomalies(config: RunConfig, idle: list[UnusedKey]) -> Iterator[Problem]:
    yield from idle_among(
        idle,
        "anomaly.loss_limit",
        "anomaly.grad_limit",
        "anomaly.drift_limit",
        "anomaly.dead_steps",
        "anomaly.diverging_limit",
        "anomaly.patience",
        "anomaly.max_skipped",
        "anomaly.leave_out",
        "anomaly.max_rollbacks",
    )
    yield from window_problems(config.anomaly)


def _of_the_schedule(config: RunConfig, idle: list[UnusedKey]) -> Iterator[Problem]:
    yield from idle_among(
        idle,
        "schedule.min_lr_ratio",
        "schedule.min_learning_rate",
        "schedule.decay_fraction",
        "schedule.power",
        "schedule.pieces",
        by="schedule.name",
    )
    yield from steps.steps_problems(config)
    yield from steps.peak_problems(config)
    yield from idle_among(idle, "schedule.min_lr_ratio", by="schedule.min_learning_rate")
    yield from idle_among(idle, "schedule.timescale")
    yield from pieces_problems(config.schedule)
    yield from idle_among(idle, "schedule.pieces[0].power", "schedule.pieces[0].end")


def _of_devices(config: RunConfig, idle: list[UnusedKey]) -> Iterator[Problem]:
    yield from idle_among(
        idle,
        "loss_scale.initial",
        "loss_scale.window",
        "loss_scale.factor",
        "loss_scale.backoff",
        "loss_scale.hysteresis",
        "loss_scale.min",
        "loss_scale.max",
    )
    yield from activation_problems(config.precision)
    yield from loss_scale_problems(config.loss_scale, config.precision.compute)
    yield from axis_problems(config.mesh)
    yield from rule_problems(config.mesh.rules)
    yield from process_problems(config.mesh)
    yield from shapes.auto_accumulation_problems(config)
    yield from shapes.division_problems(config)
    yield from shapes.balance_problems(config)
