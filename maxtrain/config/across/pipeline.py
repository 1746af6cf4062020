"""Layers in stages: what rows, experts and the vocabulary must be for them."""

from collections.abc import Iterator

from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import divisors, multiples, nearest


def pipeline_problems(config: RunConfig, batches: dict[str, int], shards: int) -> Iterator[str]:
    """What does not go with mesh.stage; an axis of a size that is not known yet has none.

    Args:
        batches: every number of rows of a step, by its key.
        shards: devices with rows of their own; 0: the mesh is not known yet.
    """
    stage = config.mesh.stage
    if stage <= 1:
        return
    if rollout_settings(config) is not None:
        yield (
            f"mesh.stage={stage} is not for completions that are sampled: they are not made in "
            "stages. Set mesh.stage=1, and mesh.fsdp or mesh.tensor higher."
        )
    if config.mesh.expert > 1:
        yield (
            f"mesh.stage={stage} does not go with mesh.expert={config.mesh.expert}: devices of "
            "several stages can't send tokens to experts in turns. "
            "Set mesh.expert=1, and mesh.fsdp or mesh.tensor higher, or mesh.stage=1."
        )
    yield from _vocabulary_problems(config)
    if shards > 0:
        for key, rows in batches.items():
            yield from _row_problems(config, key, rows, shards)
    routing = config.model.routing
    if routing.balance and routing.balance_scope == "micro_batch":
        yield (
            "model.routing.balance_scope=micro_batch goes by what is computed at a time, and "
            f"mesh.stage={stage} computes fewer rows at a time. "
            "Set model.routing.balance_scope to sequence or global."
        )


def _vocabulary_problems(config: RunConfig) -> Iterator[str]:
    size = config.model.vocab_size
    stage = config.mesh.stage
    if size is None or size % stage == 0:
        # What mesh.tensor does not divide, it says itself.
        return
    yield (
        f"mesh.stage={stage} must divide model.vocab_size={size}: stages have parts of the "
        f"embedding and of the head. Set mesh.stage to {nearest(stage, divisors(size))}."
    )


def _row_problems(config: RunConfig, key: str, rows: int, shards: int) -> Iterator[str]:
    """Rows of a device in a micro-batch that can't be divided, or too few of them to go around."""
    pipeline = config.model.pipeline
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
    if pipeline.rounds > 1 and count < config.mesh.stage:
        yield (
            f"{what} in {count} micro-batches, and model.pipeline.rounds={pipeline.rounds} needs "
            f"at least mesh.stage={config.mesh.stage} of them, so that the first stage does not "
            f"wait for the last one. Set model.pipeline.rounds=1, or {key} to "
            f"{unit * config.mesh.stage} or more."
        )
