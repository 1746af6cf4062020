"""What a number that is recorded is called and means. No jax here."""

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """One number that is recorded beside the loss, of a sum over the whole batch of a step, or over
    a whole evaluation."""

    # In the records.
    name: str
    # Such as "nats per target".
    unit: str
    # mean: the total divided once by its weight; sum: the total.
    reduction: Literal["mean", "sum"] = "mean"


# Of the next token: the loss of most runs.
NLL = Metric("nll", "nats per token")
