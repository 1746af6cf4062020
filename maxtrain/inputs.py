"""What a run reads, opened and held against its config; no jax."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import yaml

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.loader import EvaluationData, TrainingData, open_evaluation, resume_training
from data_pipeline.one_tokenizer import require_one_tokenizer
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config import RunConfig, to_yaml
from maxtrain.config.keys import show

# What of the section `data` decides which tokens are read; where they are does not.
_DECIDES = re.compile(
    r"data\.(sources\.[^.]+\.(weight|epochs)|stages|on_exhausted|seq_length|batch_size|packing|on_long|corruption\..*"
    r"|attend_across_documents|restart_positions)"
)


def open_data(
    config: RunConfig, saved: dict[str, Any] | None
) -> tuple[TrainingData, dict[str, EvaluationData]]:
    """Training data with its plan solved, and the evaluation sets; all of one tokenizer.

    `saved` is the record of the checkpoint to go on from: what was read before it must be what this
    config says, unless the config accepts that it was not.
    """
    data = resume_training(
        config.data, data_seed(config), config.steps, saved, _changes_of_data(config, saved)
    )
    rows = config.eval.batch_size or config.data.batch_size
    like = dataclasses.replace(
        config.data, seq_length=config.eval.seq_length or config.data.seq_length
    )
    sets = {
        name: open_evaluation(s.path, like, s.batch_size or rows, name)
        for name, s in config.eval.sets.items()
    }
    first = next(iter(config.data.sources))
    opened = {f"data.sources.{first}": data.shards[data.plan.names.index(first)]}
    for name, eval_set in sets.items():
        held_out = {shard.sha256 for shard in eval_set.manifest.shards}
        for source, shards in zip(data.plan.names, data.shards):
            if seen := [shard.path for shard in shards.manifest.shards if shard.sha256 in held_out]:
                rule = f"holds {len(seen):,} shards that data.sources.{source} trains on, such as {seen[0]}"
                mend = "Hold out text with `prepare --holdout`, or leave one of the two out"
                raise ConfigError(
                    f"eval.sets.{name}={eval_set.shards.path} {rule}: its loss would say nothing. {mend}."
                )
    require_one_tokenizer(
        opened | {f"eval.sets.{name}": eval_set.shards for name, eval_set in sets.items()}
    )
    if config.observe.prompts:  # whose mistakes would else come out when all is trained
        require_prompts(config.observe.prompts, data.tokenizer)
    return data, sets


def data_seed(config: RunConfig) -> int:
    """The seed of the order of rows."""
    return config.seed if config.data.seed is None else config.data.seed


def _changes_of_data(config: RunConfig, saved: dict[str, Any] | None) -> list[str]:
    """Settings that decide what is read and are not those that a checkpoint was made with: both
    values, by their keys."""
    try:
        before = yaml.safe_load((saved or {}).get("config", ""))
    except yaml.YAMLError:
        before = None
    if not isinstance(before, dict) or not isinstance(before.get("data"), dict):
        return []
    now = yaml.safe_load(to_yaml(config))
    changes = []
    was = before["data"].get("seed")
    seed = before.get("seed") if was is None else was
    if seed != data_seed(config):
        changes.append(
            f"{'seed' if config.data.seed is None else 'data.seed'} was {seed} and is {data_seed(config)}"
        )
    stages = [*(before["data"].get("stages") or ()), *now["data"]["stages"]]
    if (
        any(stage.get("unit") == "fraction" for stage in stages)
        and before.get("steps") != now["steps"]
    ):
        changes.append(
            f"steps was {before.get('steps')} and is {now['steps']}"
        )  # which such stages are fractions of
    default = yaml.safe_load(to_yaml(RunConfig()))
    then, today = (_by_path(default["data"] | tree["data"], "data") for tree in (before, now))
    for key, value in today.items():
        if _DECIDES.fullmatch(key) and key in then and then[key] != value:
            changes.append(f"{key} was {show(then[key])} and is {show(value)}")
    gone = [name for name in before["data"].get("sources") or {} if name not in config.data.sources]
    return [*changes, *(f"data.sources.{name} is gone" for name in gone)]


def _by_path(tree: Any, path: str) -> dict[str, Any]:
    """Plain values by their dotted path."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {
        key: value
        for name, inner in tree.items()
        for key, value in _by_path(inner, f"{path}.{name}").items()
    }


def require_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raises ConfigError if one of observe.prompts has no token to go on from, or is not what the
    tokenizer knows."""
    begin = 0 if tokenizer.eod_id is None else 1  # the end of the document before
    for i, prompt in enumerate(prompts):
        key = f"observe.prompts[{i}]={show(repr(prompt))}"
        try:
            length = begin + len(tokenizer.encode(prompt))
        except DataError as error:
            mend = "Write it with what the tokenizer knows, or leave it out"
            raise ConfigError(f"{key}: {error}. {mend}.") from error
        if length == 0:
            rule = "is empty, and this tokenizer has no token that a document begins with"
            raise ConfigError(f"{key} {rule}. Give some text, or leave it out.")


def with_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """The config with model.vocab_size filled in from the data; raises ConfigError if it is too
    small for the data."""
    asked = config.model.vocab_size
    if asked is not None and asked < vocab_size:
        raise ConfigError(
            f"model.vocab_size={asked} is smaller than the data's tokenizer, which has {vocab_size} entries. "
            f"Set model.vocab_size to {vocab_size} or more, or to null."
        )
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=asked or vocab_size)
    )
