"""Names, units and reductions of metrics. No jax here."""

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """Description of one metric beside the loss, summed over the whole batch of a step or over a
    whole evaluation."""

    # The name in the records.
    name: str
    # The unit, such as "nats per target".
    unit: str
    # mean: the total divided once by its weight; sum: the total.
    reduction: Literal["mean", "sum"] = "mean"


# The negative log-likelihood of the next token, the loss of most runs.
NLL = Metric("nll", "nats per token")
