"""Evaluation of a held-out set: every target counted once, sums first, one division at the end."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from data_pipeline.base.errors import DataError
from maxtrain.objectives.objective import Batch, Objective
from maxtrain.ops.quantity import NLL
from maxtrain.ops.sums import Sum
from maxtrain.parallel.hardware import compiler_options
from maxtrain.train_step.trainable import merged_models

# Batches that are under way at a time.
_AHEAD = 8
# The parameters of each model by its name, and a batch.
EvalStep = Callable[[Mapping[str, nnx.State], Batch], dict[str, Sum]]


def make_eval_step(graphdefs: Mapping[str, nnx.GraphDef | None], objective: Objective) -> EvalStep:
    """Jitted (params, batch) -> the sums that the objective evaluates, by name.

    Structures and parameters are those of each model that the objective needs, by its name; a
    structure of None: the policy without its adapters.
    """

    needed = {name: graphdefs[name] for name in objective.models}

    def step(params: Mapping[str, nnx.State], batch: Batch) -> dict[str, Sum]:
        return objective.evaluate(merged_models(needed, params), batch)

    return jax.jit(step, compiler_options=compiler_options(jax.default_backend()))


def evaluate(
    step: EvalStep,
    params: Mapping[str, nnx.State],
    batches: Iterable[Batch],
    num_tokens: int | None,
    text_bytes: int,
    summed: Collection[str] = (),
    counted: str = NLL.name,
) -> dict[str, Any]:
    """What an objective evaluates, over all batches.

    Args:
        step: of `make_eval_step`.
        params: of each model by its name.
        batches: global arrays, in which rows of padding have no weight.
        num_tokens: targets of the whole set, which must be what was evaluated; None if only part of
            it is read.
        text_bytes: UTF-8 bytes of the text of the whole set; 0: some of it is no target.
        summed: of what else the step gives, the names of which the total is recorded, not the mean.
        counted: what the objective counts targets by.

    Returns:
        tokens (evaluated); where that is `nll`, also nll (nats per target), perplexity, and
        bits_per_byte if the whole set was read; and the mean, or the total, of everything else that
        the step gives.

    Raises:
        DataError: the whole set was meant and another number of targets came.
    """
    sums: list[dict[str, Sum]] = []
    for batch in batches:
        sums.append(step(params, batch))
        # Else all batches of a large set would be on the device at once.
        jax.block_until_ready(sums[-_AHEAD:][0])
    sums = jax.device_get(sums)
    total, weight = _total(sums, counted)
    if num_tokens is not None and weight != num_tokens:
        rule = f"read {weight:,.0f} targets, but its manifest has {num_tokens:,}"
        raise DataError(f"the evaluation {rule}. Run `prepare verify` on the set.")
    result: dict[str, Any] = {}
    if counted == NLL.name:
        nll = _mean(total, weight)
        result = {"nll": nll, "perplexity": math.exp(min(nll, 700.0))}
    result["tokens"] = int(weight)
    if counted == NLL.name and num_tokens is not None and text_bytes:
        result["bits_per_byte"] = total / math.log(2) / text_bytes
    others = dict.fromkeys(name for batch in sums for name in batch if name != counted)
    for name in others:
        total, weight = _total(sums, name)
        result[name] = total if name in summed else _mean(total, weight)
    return result


class NotFinite(NamedTuple):
    """A number of an evaluation that is not finite: what it is called in a sentence, and itself."""

    name: str
    value: float


def not_finite(result: Mapping[str, Any]) -> NotFinite | None:
    """The first number of an evaluation that is not finite; None: all are."""
    for name, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            if name == "nll":
                name = "the loss"
            return NotFinite(name, value)
    return None


def _total(sums: Sequence[dict[str, Sum]], name: str) -> tuple[float, float]:
    """One sum over all batches: its total and its weight."""
    total = math.fsum(float(batch[name].total) for batch in sums)
    weight = math.fsum(float(batch[name].weight) for batch in sums)
    return total, weight


def _mean(total: float, weight: float) -> float:
    """NaN: of nothing."""
    if not weight:
        return math.nan
    return total / weight
