"""The rows of a run: their lengths, and what the model is meant for."""

from collections.abc import Iterator

from maxtrain.config.schema import RunConfig


def row_lengths(config: RunConfig) -> dict[str, int]:
    """Every length of rows in tokens, by its key."""
    lengths = {"data.seq_length": config.data.seq_length}
    for index, stage in enumerate(config.data.stages):
        if stage.seq_length:
            lengths[f"data.stages[{index}].seq_length"] = stage.seq_length
    if config.eval.seq_length:
        lengths["eval.seq_length"] = config.eval.seq_length
    return lengths


def rows_of_step(config: RunConfig) -> int:
    """Rows of a batch, as long as no stage of the data says otherwise."""
    if config.data.packing == "balanced":
        return config.data.balance_rows
    return config.data.batch_size


def row_problems(config: RunConfig) -> Iterator[str]:
    """Rows that are longer than the model is meant for."""
    longest = config.model.max_length
    for key, length in row_lengths(config).items():
        if length > longest:
            yield (
                f"{key}={length} must be at most model.max_length={longest}. "
                f"Set {key}={longest} or less, or model.max_length={length}."
            )
