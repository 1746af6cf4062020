"""The data of a run, opened and checked against its config; no jax."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import ConfigError, DataError, UserError
from data_pipeline.base.remote import is_url, place
from data_pipeline.config import DataConfig
from data_pipeline.loader.loader import (
    EvaluationData,
    TrainingData,
    open_evaluation,
    resume_training,
)
from data_pipeline.loader.one_tokenizer import require_one_tokenizer
from data_pipeline.plan.document_packing import document_targets
from data_pipeline.shards import Manifest, TokenShards
from data_pipeline.shards.teacher_logits import StoredTeacher, TeacherFiles, folder_of
from data_pipeline.tokenizer import TOKENIZER_FOLDER, Tokenizer
from data_pipeline.tokenizer.base import describe_tokenizer
from maxtrain.checkpoint.run_state import RunState
from maxtrain.config import RunConfig, to_yaml
from maxtrain.config.keys import show
from maxtrain.config.paths import MADE, path_keys
from maxtrain.config.run_path import run_path
from maxtrain.config.sections.dpo import UNPAIRED
from maxtrain.config.shipped import PREPARED_BY
from maxtrain.models.cost import relative_quadratic
from maxtrain.weights.peft_settings import require_same_settings

# Keys of the section `data` that decide which tokens are read. Paths do not.
_DECIDES = re.compile(
    r"data\.(sources\.[^.]+\.(weight|epochs)|stages|on_exhausted|seq_length|batch_size|packing"
    r"|balance_rows|balance_quadratic|on_long|corruption\..*|attend_across_documents"
    r"|restart_positions)"
)


def open_data(
    config: RunConfig, saved: RunState | None
) -> tuple[TrainingData, dict[str, EvaluationData]]:
    """Open the training data with its plan solved, and the evaluation sets; all of one tokenizer.

    `saved` is the run at the checkpoint to resume from: the data read before it must match this
    config, unless data.accept_changes is set. None: a new run; settings of checkpoint.init_adapters
    must then match the config.
    """
    if saved is None and config.checkpoint.init_adapters is not None:
        require_same_settings(Path(config.checkpoint.init_adapters), config.model.lora)
    if saved is not None:
        _require_tokenizer_of_run(config, saved)
    try:
        data = open_training_data(config, saved)
    except DataError as error:
        raise DataError(f"{error}{_how_prepared(config)}") from error
    sets = _open_sets(config)
    for name, eval_set in sets.items():
        _require_held_out(name, eval_set, data)
    first = next(iter(config.data.sources))
    opened = {f"data.sources.{first}": data.shards[data.plan.names.index(first)]}
    for name, eval_set in sets.items():
        opened[f"eval.sets.{name}"] = eval_set.shards
    require_one_tokenizer(opened)
    # Otherwise a bad prompt would fail only at the end of training.
    if config.observe.prompts:
        require_prompts(config.observe.prompts, data.tokenizer)
    return data, sets


def _require_tokenizer_of_run(config: RunConfig, saved: RunState) -> None:
    """Raise a ConfigError if a run would continue with data of another tokenizer than it was
    trained with."""
    if not saved.tokenizer:
        return
    for name, source in config.data.sources.items():
        try:
            tokenizer = Manifest.load(place(source.path)).tokenizer
        except UserError:
            # The reader of the data reports its problems later.
            continue
        if tokenizer["sha256"] != saved.tokenizer:
            own = f"{saved.owner}/{TOKENIZER_FOLDER}"
            if not saved.is_of_another_run:
                own = f"{run_path(config) / TOKENIZER_FOLDER}"
            trained = f"until step {saved.step:,} (sha256 {saved.tokenizer[:12]})"
            words = describe_tokenizer(
                tokenizer["name"], tokenizer["vocab_size"], tokenizer["sha256"]
            )
            raise ConfigError(
                f"data.sources.{name}.path={source.path} was made with another tokenizer, "
                f"{words}, than {saved.owner} has been trained with {trained}, so that ids would "
                f"mean different text. Prepare the data with `--tokenizer {own}`, or "
                f"{saved.way_out}."
            )


def _how_prepared(config: RunConfig) -> str:
    """Return the command that prepares the data of a shipped config, if the data is missing; else
    an empty text."""
    for source in config.data.sources.values():
        if source.path in PREPARED_BY and not Path(source.path).exists():
            return f" The data that the config is meant for: `{PREPARED_BY[source.path]}`."
    return ""


def open_training_data(config: RunConfig, saved: RunState | None) -> TrainingData:
    """Open the training data of a run with its plan solved; `saved` as for `open_data`."""
    changes: list[str] = []
    read = None
    if saved is not None:
        changes = _changes_of_data(config, saved.config)
        read = saved.data
    section = data_section(config)
    state = saved or RunState()
    data = resume_training(
        section, data_seed(config), config.steps, read, changes, state.owner, state.way_out
    )
    if config.model.vocab_size is not None:
        data.limit_vocabulary(config.model.vocab_size)
    return data


def _open_sets(config: RunConfig) -> dict[str, EvaluationData]:
    """Open the evaluation sets, by name."""
    length = config.eval.seq_length or config.data.seq_length
    like = dataclasses.replace(config.data, seq_length=length)
    rows = config.eval.batch_size or config.data.batch_size
    sets = {}
    for name, section in config.eval.sets.items():
        sets[name] = open_evaluation(section.path, like, section.batch_size or rows, name)
        if config.model.vocab_size is not None:
            sets[name].limit_vocabulary(config.model.vocab_size)
    return sets


def _require_held_out(name: str, eval_set: EvaluationData, data: TrainingData) -> None:
    """Raise a ConfigError if an evaluation set holds shards that are trained on."""
    held_out = {shard.sha256 for shard in eval_set.manifest.shards}
    for source, shards in zip(data.plan.names, data.shards):
        seen = [shard.path for shard in shards.manifest.shards if shard.sha256 in held_out]
        if seen:
            key = f"eval.sets.{name}={eval_set.shards.path}"
            where = f"data.sources.{source} trains on, such as {seen[0]}"
            rule = f"holds {len(seen):,} shards that {where}: its loss would say nothing"
            fix = "Hold out text with `prepare --holdout`, or leave one of the two out"
            raise ConfigError(f"{key} {rule}. {fix}.")


def inputs_on_record(
    data: TrainingData, sets: Mapping[str, EvaluationData]
) -> dict[str, dict[str, str]]:
    """Return the digest of the content of each source and set, by its key, for launches.jsonl."""
    found = {}
    for name, shards in zip(data.plan.names, data.shards):
        found[f"data.sources.{name}.path"] = shards.uid
    for name, eval_set in sets.items():
        found[f"eval.sets.{name}.path"] = eval_set.manifest.uid
    return {"inputs": found}


def with_recorded_inputs(
    config: RunConfig, launches: Sequence[Mapping[str, Any]]
) -> tuple[RunConfig, list[str]]:
    """Replace relative paths of data and models that are missing here, or lead to other data here,
    by the paths that earlier launches of the run used.

    Args:
        config: of this launch.
        launches: the records of earlier launches in launches.jsonl.

    Returns:
        the changed config, and a log line about each changed path.
    """
    folders = list(dict.fromkeys(str(launch.get("folder", "")) for launch in reversed(launches)))
    digests: dict[str, str] = {}
    for launch in launches:
        digests |= launch.get("inputs") or {}
    notes = []
    for entry in path_keys(config):
        path = entry.value
        if entry.key in MADE or not path or is_url(path) or os.path.isabs(path):
            continue
        expected = digests.get(entry.key)
        if os.path.exists(path) and (
            expected is None or config.data.accept_changes or _digest_of_data(path) == expected
        ):
            continue
        for folder in filter(None, folders):
            absolute = os.path.normpath(os.path.join(folder, path))
            is_same = os.path.exists(absolute) and (
                expected is None or _digest_of_data(absolute) == expected
            )
            if is_same:
                config = _with_path(config, entry.key, absolute)
                notes.append(_moved_note(entry.key, path, absolute, expected))
                break
    return config, notes


def _moved_note(key: str, path: str, absolute: str, expected: str | None) -> str:
    """Return a log line about a path that is resolved from the folder of an earlier launch."""
    if not os.path.exists(path):
        return (
            f"{key}={path} is not in {os.getcwd()}; the run goes on with {absolute}, which it has "
            "used before."
        )
    return (
        f"{key}={path} is other data in {os.getcwd()} (digest {_digest_of_data(path)}) than the "
        f"run has read before (digest {expected}); the run goes on with that, {absolute}. For "
        "other data, set data.accept_changes=true."
    )


def _digest_of_data(path: str) -> str:
    """Return the content digest of prepared data; empty: it cannot be read."""
    try:
        return Manifest.load(Path(path)).uid
    except UserError:
        return ""


def _with_path(section: Any, key: str, value: str) -> Any:
    """Replace one path in a section of a config."""
    name, _, below = key.partition(".")
    if isinstance(section, dict):
        return {**section, name: _with_path(section[name], below, value)}
    if below:
        value = _with_path(getattr(section, name), below, value)
    return dataclasses.replace(section, **{name: value})


def data_section(config: RunConfig) -> DataConfig:
    """Return the section `data`, with data.balance_quadratic filled in from the model's layers if
    it is null."""
    data = config.data
    if data.packing != "balanced" or data.balance_quadratic is not None:
        return data
    return dataclasses.replace(data, balance_quadratic=relative_quadratic(config.model))


def data_seed(config: RunConfig) -> int:
    """Return the seed of the order of rows: data.seed, or the run's seed if that is null."""
    if config.data.seed is None:
        return config.seed
    return config.data.seed


def _changes_of_data(config: RunConfig, saved: str) -> list[str]:
    """List the data settings that differ between the config and the checkpoint's config (YAML
    text).

    Each entry has the key and both values.
    """
    try:
        before = strict_yaml.loads(saved)
    except ValueError:
        before = None
    if not isinstance(before, dict) or not isinstance(before.get("data"), dict):
        return []
    now = strict_yaml.loads(to_yaml(config))
    changes = []
    seed_before = before["data"].get("seed")
    if seed_before is None:
        seed_before = before.get("seed")
    if seed_before != data_seed(config):
        key = "seed" if config.data.seed is None else "data.seed"
        changes.append(f"{key} was {seed_before} and is {data_seed(config)}")
    # Stages given as fractions end at other steps if the number of steps changes, although their
    # own values are equal.
    stages = [*(before["data"].get("stages") or ()), *now["data"]["stages"]]
    in_fractions = any(stage.get("unit") == "fraction" for stage in stages)
    if in_fractions and before.get("steps") != now["steps"]:
        changes.append(
            f"steps was {before.get('steps')} and is {now['steps']}, and a stage of data.stages "
            "ends at a fraction of the steps"
        )
    default = strict_yaml.loads(to_yaml(RunConfig()))
    values_before = _by_path(default["data"] | before["data"], "data")
    values_now = _by_path(default["data"] | now["data"], "data")
    for key, value in values_now.items():
        if not _DECIDES.fullmatch(key) or key not in values_before:
            continue
        if values_before[key] != value:
            changes.append(f"{key} was {show(values_before[key])} and is {show(value)}")
    for name in before["data"].get("sources") or {}:
        if name not in config.data.sources:
            changes.append(f"data.sources.{name} is gone")
    return changes


def _by_path(tree: Any, path: str) -> dict[str, Any]:
    """Flatten a tree into plain values by their dotted path."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    found = {}
    for name, inner in tree.items():
        found |= _by_path(inner, f"{path}.{name}")
    return found


def attach_stored_teacher(
    config: RunConfig, data: TrainingData, sets: Mapping[str, EvaluationData]
) -> None:
    """Attach the stored logits of a teacher to all batches, if the config names them.

    Raises:
        ConfigError: the files were made with other settings than the config's.
        DataError: the files are incomplete, damaged, or of other data.
    """
    if config.objective != "distill" or config.distill.stored is None:
        return
    opened = []
    teachers = set()
    for name, shards in zip(data.plan.names, data.shards):
        length = max(span.seq_length for span in data.plan.spans)
        opened.append(_open_stored(config, f"data.sources.{name}", shards, length))
        teachers.add(opened[-1].record.teacher)
    top = config.distill.top
    data.teacher = TeacherFiles(opened, [shards.num_tokens for shards in data.shards], top)
    for name, eval_set in sets.items():
        key = f"eval.sets.{name}"
        found = _open_stored(config, key, eval_set.shards, eval_set.config.seq_length)
        teachers.add(found.record.teacher)
        eval_set.teacher = TeacherFiles([found], [eval_set.shards.num_tokens], top)
    if len(teachers) > 1:
        raise ConfigError(
            f"distill.stored={config.distill.stored} is of {len(teachers)} teachers in the sources "
            "and sets of the config. Make all of them with the same one, by `maxtrain teach`."
        )


def _open_stored(config: RunConfig, key: str, shards: TokenShards, length: int) -> StoredTeacher:
    """Open a teacher's stored logits of a source or set, and check them against the config.
    `length`: tokens of a row."""
    distill = config.distill
    folder = folder_of(shards, distill.stored or "", "distill.stored")
    try:
        found = StoredTeacher.open(folder, shards, config.data.verify)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    record = found.record
    if record.top < distill.top:
        raise ConfigError(
            f"distill.top={distill.top}, but {folder} has {record.top} entries of each token. Set "
            f"distill.top={record.top}, or make it again with `maxtrain teach --top`."
        )
    if record.temperature != distill.temperature:
        raise ConfigError(
            f"distill.temperature={distill.temperature}, but {folder} was made at "
            f"{record.temperature}. Set distill.temperature={record.temperature}, or make it again "
            "with `maxtrain teach --temperature`."
        )
    longest = int(document_targets(shards, np.arange(shards.num_documents))[1].max())
    if min(longest, length) > record.length:
        raise ConfigError(
            f"rows of {key} have up to {min(longest, length):,} tokens of a document, and {folder} "
            f"has the first {record.length:,} of each. Set data.seq_length={record.length}, or "
            "make it again with `maxtrain teach --seq-length`."
        )
    return found


def require_prompts(prompts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise a ConfigError if one of observe.prompts is empty without a token to begin with, or
    cannot be encoded."""
    # A prompt follows an end-of-document token if the tokenizer has one.
    begin = 0 if tokenizer.eod_id is None else 1
    for i, prompt in enumerate(prompts):
        key = f"observe.prompts[{i}]={show(repr(prompt))}"
        try:
            length = begin + len(tokenizer.encode(prompt))
        except DataError as error:
            fix = "Write it with what the tokenizer knows, or leave it out"
            raise ConfigError(f"{key}: {error}. {fix}.") from error
        if length == 0:
            rule = "is empty, and this tokenizer has no token that a document begins with"
            raise ConfigError(f"{key} {rule}. Give some text, or leave it out.")


def require_answers(
    config: RunConfig, data: TrainingData, sets: Mapping[str, EvaluationData]
) -> None:
    """Raise a ConfigError if training data or a set lacks what the objective compares: answer
    pairs, or answers with a label."""
    if config.objective not in ("dpo", "reward"):
        return
    read = {}
    for name, shards in zip(data.plan.names, data.shards):
        read[f"data.sources.{name}.path"] = shards
    for name, eval_set in sets.items():
        read[f"eval.sets.{name}.path"] = eval_set.shards
    for key, shards in read.items():
        where = f"{key}={shards.path}"
        if config.objective == "dpo" and config.dpo.loss_type in UNPAIRED:
            if shards.group != 1 or not shards.valued:
                raise ConfigError(
                    f"dpo.loss_type={config.dpo.loss_type} learns from answers with a label, and "
                    f"{where} holds none. Make them with `prepare --preferences` from prompt, "
                    "completion and label, or set dpo.loss_type=sigmoid for pairs."
                )
            continue
        if shards.group != 2:
            raise ConfigError(
                f"objective={config.objective} compares two answers, and {where} holds no pairs. "
                "Make pairs with `prepare --preferences`, or set objective=dpo and "
                "dpo.loss_type=kto for answers with a label."
            )
        if config.objective == "reward" and config.reward.margin and not shards.valued:
            raise ConfigError(
                f"reward.margin=True needs the margin of each pair, and {where} has none. Prepare "
                "it with --margin, or leave reward.margin out."
            )
    if config.objective == "reward":
        _require_same_ends(read)


def have_end_marks(data: TrainingData) -> bool:
    """Return whether the training documents end with an end-of-document token."""
    return data.shards[0].manifest.eod == "append"


def _require_same_ends(read: Mapping[str, TokenShards]) -> None:
    """Raise a ConfigError if some data was prepared with end-of-document tokens and some without.

    The reward is read at the last token of an answer, which must be the same token everywhere.
    """
    first, *others = read.items()
    for other in others:
        if first[1].manifest.eod == other[1].manifest.eod:
            continue
        pair = sorted((first, other), key=lambda item: item[1].manifest.eod)
        (with_key, with_marks), (key, without) = pair
        raise ConfigError(
            f"objective=reward scores the last token of an answer: in {with_key}={with_marks.path} "
            f"that is an end-of-document token, and {key}={without.path} has none. Prepare both "
            "with --eod append, or both with --eod none."
        )


def with_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """Return the config with model.vocab_size filled in from the data. Raise a ConfigError if the
    configured size is too small.

    ConfigError: it is too small for the data.
    """
    size = config.model.vocab_size
    if size is not None and size < vocab_size:
        rule = f"is smaller than the data's tokenizer, which has {vocab_size} entries"
        fix = f"Set model.vocab_size to {vocab_size} or more, or to null"
        raise ConfigError(f"model.vocab_size={size} {rule}. {fix}.")
    model = dataclasses.replace(config.model, vocab_size=size or vocab_size)
    return dataclasses.replace(config, model=model)
