"""Evaluation of a held-out set: every target counts once; sums are divided once, at the end."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from data_pipeline.base.errors import DataError
from maxtrain.objectives.objective import Batch, Objective
from maxtrain.ops.quantity import NLL
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.hardware import compiler_options
from maxtrain.train_step.trainable import merged_models

# Batches in flight at a time.
_AHEAD = 8
# Maps the parameters of each model by its name, and a batch, to the evaluated sums.
EvalStep = Callable[[Mapping[str, nnx.State], Batch], dict[str, WeightedSum]]


def make_eval_step(graphdefs: Mapping[str, nnx.GraphDef | None], objective: Objective) -> EvalStep:
    """Build the jitted function from (params, batch) to the sums that the objective evaluates, by
    name.

    `graphdefs` and `params` have an entry for each model that the objective needs, by its name. A
    structure of None means the policy without its adapters.
    """

    needed = {name: graphdefs[name] for name in objective.models}

    def step(params: Mapping[str, nnx.State], batch: Batch) -> dict[str, WeightedSum]:
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
    """Evaluate an objective over all batches.

    Args:
        step: from `make_eval_step`.
        params: the parameters of each model by its name.
        batches: global arrays. Padding rows have no weight.
        num_tokens: number of targets of the whole set, which must equal the number evaluated; None
            if only part of the set is read.
        text_bytes: UTF-8 bytes of the text of the whole set; 0: some of the text is no target.
        summed: names of the other sums whose total is recorded instead of the mean.
        counted: name of the sum whose weight is the number of targets.

    Returns:
        tokens (number evaluated); if `counted` is `nll`, also nll (nats per target), perplexity,
        and bits_per_byte if the whole set was read; and the mean or total of every other sum.

    Raises:
        DataError: the number of evaluated targets is not `num_tokens`.
    """
    sums: list[dict[str, WeightedSum]] = []
    for batch in batches:
        sums.append(step(params, batch))
        # Wait for an earlier batch; otherwise all batches of a large set would be on the device at
        # once.
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


class NonFiniteNumber(NamedTuple):
    """An evaluated number that is not finite, with its name for messages."""

    name: str
    value: float


def not_finite(result: Mapping[str, Any]) -> NonFiniteNumber | None:
    """Return the first number of an evaluation that is not finite; None: all are finite."""
    for name, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            if name == "nll":
                name = "the loss"
            return NonFiniteNumber(name, value)
    return None


def _total(sums: Sequence[dict[str, WeightedSum]], name: str) -> tuple[float, float]:
    """Add up one sum over all batches, and return its total and its weight."""
    total = math.fsum(float(batch[name].total) for batch in sums)
    weight = math.fsum(float(batch[name].weight) for batch in sums)
    return total, weight


def _mean(total: float, weight: float) -> float:
    """Return the mean; NaN if the weight is 0."""
    if not weight:
        return math.nan
    return total / weight
