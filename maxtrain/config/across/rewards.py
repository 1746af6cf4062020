"""Reward models: what else a run of theirs may ask for."""

from collections.abc import Iterator

from maxtrain.config.schema import RunConfig


def score_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem if a reward model has no score, or must do what only a model of logits
    does.
    """
    if config.objective != "reward":
        return
    if not config.model.score:
        yield (
            "objective=reward trains a score, and the model has none with model.score=False. "
            "Set model.score=true."
        )
    if config.loss.adversarial:
        yield (
            f"loss.adversarial={config.loss.adversarial} is of losses of tokens, and "
            "objective=reward has none. Leave it out."
        )
    if config.data.corruption.rate:
        yield (
            f"data.corruption.rate={config.data.corruption.rate} replaces tokens of inputs, and "
            "objective=reward reads answers as they are. Leave it out."
        )
    if config.observe.prompts:
        yield (
            "observe.prompts are to be completed, and a model with objective=reward writes no "
            "text. Leave them out."
        )
