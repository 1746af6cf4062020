"""Evaluation of a held-out set: every target counted once, sums first, one division at the end."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from data_pipeline.errors import DataError
from maxtrain.ops.sums import Sum
from maxtrain.parallel.hardware import compiler_options
from maxtrain.training.objective import Batch, Objective
from maxtrain.training.partition import POLICY

# Batches that are under way at a time.
_AHEAD = 8
EvalStep = Callable[[nnx.State, Batch], Sum]


def make_eval_step(graphdef: nnx.GraphDef, objective: Objective) -> EvalStep:
    """Jitted (params, batch) -> Sum."""

    def step(params: nnx.State, batch: Batch) -> Sum:
        return objective.nll({POLICY: nnx.merge(graphdef, params)}, batch)

    return jax.jit(step, compiler_options=compiler_options(jax.default_backend()))


def evaluate(
    step: EvalStep,
    params: nnx.State,
    batches: Iterable[Batch],
    num_tokens: int | None,
    text_bytes: int,
) -> dict[str, Any]:
    """Negative log-likelihood over all batches.

    Args:
        step, params, batches: of `make_eval_step`, of the model, and global arrays, in which rows
        of padding have no weight.
        num_tokens: targets of the whole set, which must be what was evaluated; None if only part of
            it is read.
        text_bytes: UTF-8 bytes of the text of the whole set; 0: some of it is no target.

    Returns:
        nll (nats per target), perplexity, tokens (evaluated), and bits_per_byte if the whole set
        was read.

    Raises:
        DataError: the whole set was meant and another number of targets came.
    """
    sums: list[Sum] = []
    for batch in batches:
        sums.append(step(params, batch))
        # Else all batches of a large set would be on the device at once.
        jax.block_until_ready(sums[-_AHEAD:][0])
    sums = jax.device_get(sums)
    total = math.fsum(float(s.total) for s in sums)
    weight = math.fsum(float(s.weight) for s in sums)
    if num_tokens is not None and weight != num_tokens:
        rule = f"read {weight:,.0f} targets, but its manifest has {num_tokens:,}"
        raise DataError(f"the evaluation {rule}. Run `prepare verify` on the set.")
    nll = math.nan
    if weight:
        nll = total / weight
    result = {"nll": nll, "perplexity": math.exp(min(nll, 700.0)), "tokens": int(weight)}
    if num_tokens is not None and text_bytes:
        result["bits_per_byte"] = total / math.log(2) / text_bytes
    return result
