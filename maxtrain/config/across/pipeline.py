"""Layers in stages: what layers, rows, experts and the vocabulary must be for them."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import ModelConfig, RunConfig
from maxtrain.config.sections.dpo import COMPARED
from maxtrain.config.sections.mesh import (
    MeshConfig,
    num_stages,
    stage_words,
    without_stages,
)
from maxtrain.config.sections.model import MAX_LAYERS, layer_period
from maxtrain.config.sections.moe import DEEPSEEK
from maxtrain.config.words import choices, divisors, multiples, nearest


class EqualStageCounts(NamedTuple):
    """Repeated layers, which pipeline stages divide equally.

    Attributes:
        count: layers that are alike, or groups of layers that take turns.
        length: layers of a group.
        others: layers before and after these, which all stages compute.
    """

    count: int
    length: int
    others: int


def alike_layers(model: ModelConfig) -> EqualStageCounts:
    """Return the repeated layers of a model, as its family builds them."""
    length = len(layer_period(model))
    dense = 0
    if model.family in DEEPSEEK and model.moe.dense_layers < model.num_layers:
        dense = model.moe.dense_layers
    # Fewer layers than take turns are a group, too.
    count = max(1, (model.num_layers - dense) // length)
    return EqualStageCounts(count, length, max(0, model.num_layers - count * length))


def pipeline_problems(config: RunConfig, batches: dict[str, int], shards: int) -> Iterator[str]:
    """Yield the settings that do not go with mesh.stage; a mesh axis without a known size has no
    problems.

    Args:
        batches: every number of rows of a step, by its key.
        shards: devices with rows of their own; 0: the mesh is not known yet.
    """
    mesh = config.mesh
    if num_stages(mesh) <= 1:
        return
    split = stage_words(mesh)
    if rollout_settings(config) is not None:
        yield (
            f"{split} is not for completions that are sampled: they are not made in stages. "
            f"Set {without_stages(mesh)}, and mesh.fsdp or mesh.tensor higher."
        )
    if mesh.expert > 1:
        yield (
            f"{split} does not go with mesh.expert={mesh.expert}: devices of several stages can't "
            "send tokens to experts in turns. Set mesh.expert=1, and mesh.fsdp or mesh.tensor "
            f"higher, or {without_stages(mesh)}."
        )
    yield from _schedule_problems(config)
    yield from layer_problems(config, config.checkpoint.init_from is not None)
    yield from _vocabulary_problems(config)
    if shards > 0:
        for key, rows in batches.items():
            yield from _row_problems(config, key, rows, shards)
    routing = config.model.routing
    if routing.balance and routing.balance_scope == "micro_batch":
        yield (
            "model.routing.balance_scope=micro_batch goes by what is computed at a time, and "
            f"{split} computes fewer rows at a time. "
            "Set model.routing.balance_scope to sequence or global."
        )


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that the 1F1B schedule excludes: several rounds, and passes beside the one
    through the stages.
    """
    pipeline = config.model.pipeline
    if pipeline.schedule != "1f1b":
        return
    what = "model.pipeline.schedule=1f1b"
    if pipeline.rounds > 1:
        yield (
            f"{what} takes rows through stages once, and model.pipeline.rounds={pipeline.rounds} "
            "several times. Set model.pipeline.rounds=1, or model.pipeline.schedule=gpipe."
        )
    for second, fix in _second_passes(config):
        yield (
            f"{what} goes through stages once, with the loss behind the last one; {second}. "
            f"Set {fix}, or model.pipeline.schedule=gpipe."
        )


def may_take_turns(config: RunConfig) -> bool:
    """Return whether the schedule could be 1F1B, but the config has another one."""
    pipeline = config.model.pipeline
    is_plain = pipeline.schedule == "gpipe" and pipeline.rounds == 1
    return num_stages(config.mesh) > 1 and is_plain and not list(_second_passes(config))


def goes_row_by_row(config: RunConfig) -> bool:
    """Return whether the activations that stages keep are independent of the number of rows, so
    that accumulation saves no memory.
    """
    pipeline = config.model.pipeline
    is_staged = num_stages(config.mesh) > 1
    return is_staged and pipeline.schedule == "1f1b" and pipeline.micro_batches is None


def _second_passes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Passes of a micro-batch beside the one that trains, each with what spares it.

    What samples completions is refused with stages, whatever their schedule.
    """
    if config.loss.adversarial:
        adversarial = config.loss.adversarial
        yield (
            f"loss.adversarial={adversarial} passes rows several times",
            "loss.adversarial=0, without other keys of it",
        )
    has_teacher = config.objective == "distill" and config.distill.teacher is not None
    if has_teacher and not config.distill.on_policy:
        yield (
            f"distill.teacher={config.distill.teacher} passes rows through a second model",
            "distill.teacher=null and distill.stored to what `maxtrain teach` keeps of it",
        )
    has_reference = config.objective == "dpo" and config.dpo.loss_type in COMPARED
    if has_reference and config.dpo.reference_logprobs == "computed":
        fix = "dpo.reference_logprobs=stored"
        if config.dpo.loss_type == "kto":
            # What KTO compares with is found for each batch anew.
            fix += " and dpo.loss_type=apo_zero_unpaired"
        yield (
            f"dpo.loss_type={config.dpo.loss_type} passes rows through a reference, too",
            fix,
        )


def layer_problems(config: RunConfig, has_weights: bool) -> Iterator[str]:
    """Layers of which stages can't have equal numbers in each round.

    Args:
        has_weights: the number of layers is that of weights that are there.
    """
    stages = num_stages(config.mesh)
    rounds = config.model.pipeline.rounds
    alike = alike_layers(config.model)
    if alike.count % (stages * rounds) == 0:
        return
    what = stage_words(config.mesh)
    if rounds > 1:
        what += f" times model.pipeline.rounds={rounds}"
    fixes = _stage_mends(config)
    if rounds > 1 and alike.count % stages == 0:
        valid = nearest(rounds, divisors(alike.count // stages))
        fixes.append(f"model.pipeline.rounds to {valid}")
    if not has_weights:
        fixes += _num_layers_mend(config)
    yield f"{what} must divide {_in_words(alike, config.model)}. Set {', or '.join(fixes)}."


def _in_words(alike: EqualStageCounts, model: ModelConfig) -> str:
    """Describe the number that must be divisible, and the keys that it comes from."""
    layers = f"model.num_layers={model.num_layers}"
    if alike.length > 1:
        kind = f"model.family={model.family}"
        return f"{alike.count}, the groups of {alike.length} layers of {kind} in {layers}"
    if alike.others:
        dense = f"model.moe.dense_layers={alike.others}"
        return f"{alike.count}, the layers of {layers} that come after {dense}"
    return layers


def _stage_mends(config: RunConfig) -> list[str]:
    """Return settings that give a number of stages which divides the layers and the vocabulary, one
    setting each.
    """
    rounds = config.model.pipeline.rounds
    alike = alike_layers(config.model).count
    if rounds > 1 and alike % rounds == 0:
        # One stage has no rounds.
        several = [count for count in _stages(config, alike // rounds) if count > 1]
        found = _by_one_axis(config.mesh, several)
        if found:
            return found
    valid = _stages(config, alike)
    first = ""
    if rounds > 1:
        first = "model.pipeline.rounds=1 and "
    found = _by_one_axis(config.mesh, valid)
    if not found:
        found = [f"mesh.dcn_stage=1 and mesh.stage to {nearest(num_stages(config.mesh), valid)}"]
    return [first + fix for fix in found]


def _by_one_axis(mesh: MeshConfig, valid: list[int]) -> list[str]:
    """Sizes of each axis with which the other one makes one of these numbers of stages."""
    found = []
    for key, size, other in (
        ("mesh.stage", mesh.stage, mesh.dcn_stage),
        ("mesh.dcn_stage", mesh.dcn_stage, mesh.stage),
    ):
        sizes = [count // other for count in valid if count % other == 0]
        is_slow = key == "mesh.dcn_stage"
        if sizes and not (is_slow and size == 1):
            found.append(f"{key} to {nearest(size, sizes)}")
    return found


def _stages(config: RunConfig, blocks: int) -> list[int]:
    """Return the numbers of stages that divide this number of layer blocks, and the vocabulary if
    its size is known.
    """
    return divisors(math.gcd(blocks, config.model.vocab_size or 0))


def _num_layers_mend(config: RunConfig) -> list[str]:
    """The next numbers of layers that are right, of those that keep what is beside the groups."""
    model = config.model
    alike = alike_layers(model)
    blocks = num_stages(config.mesh) * model.pipeline.rounds
    below = alike.count // blocks * blocks
    valid = []
    for count in (below, below + blocks):
        num_layers = model.num_layers + (count - alike.count) * alike.length
        if count and num_layers <= MAX_LAYERS:
            changed = dataclasses.replace(model, num_layers=num_layers)
            # With more layers than are dense, or than take turns, others are alike.
            if alike_layers(changed).count == count:
                valid.append(num_layers)
    if not valid:
        return []
    return [f"model.num_layers to {choices(valid)}"]


def _vocabulary_problems(config: RunConfig) -> Iterator[str]:
    size = config.model.vocab_size
    if size is None or size % num_stages(config.mesh) == 0:
        # What mesh.tensor does not divide, it says itself.
        return
    yield (
        f"{stage_words(config.mesh)} must divide model.vocab_size={size}: stages have parts of the "
        f"embedding and of the head. Set {', or '.join(_stage_mends(config))}."
    )


def _row_problems(config: RunConfig, key: str, rows: int, shards: int) -> Iterator[str]:
    """Rows of a device in a micro-batch that can't be divided, or too few of them to go around."""
    pipeline = config.model.pipeline
    stages = num_stages(config.mesh)
    unit = shards * config.optimizer.least_micro_batches
    if rows % unit:
        return
    of_device = rows // unit
    count = pipeline.micro_batches or of_device
    what = f"{key}={rows} gives each device {of_device} rows at a time"
    if of_device % count:
        valid = nearest(count, divisors(of_device))
        yield (
            f"{what}, which model.pipeline.micro_batches={count} must divide. "
            f"Set model.pipeline.micro_batches to {valid}, or {key} to "
            f"{multiples(rows, unit * count)}."
        )
    if pipeline.rounds > 1 and count < stages:
        yield (
            f"{what} in {count} micro-batches, and model.pipeline.rounds={pipeline.rounds} needs "
            f"at least {stage_words(config.mesh)} of them, so that the first stage does not "
            f"wait for the last one. Set model.pipeline.rounds=1, or {key} to "
            f"{unit * stages} or more."
        )
