"""Initial weights of a run, of any kind: a Hugging Face directory, or a run of maxtrain or one of
its checkpoints.

Only parameters and buffers are read, onto this run's mesh: its optimizer, its data and its steps
begin anew. Nothing is padded, truncated or cast; `checkpoint.init_partial` names the parameters
that may be missing or different and stay as they were initialised.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import ConfigError, DamagedError, StorageError, UserError
from data_pipeline.base.hub import download_hint
from data_pipeline.base.remote import is_url
from data_pipeline.loader.one_tokenizer import tokenizer_of_data
from data_pipeline.shards import TOKENIZER, TokenShards
from data_pipeline.tokenizer import CARRIED, TOKENIZER_FOLDER, load_tokenizer
from maxtrain.checkpoint.at_url import url_of
from maxtrain.checkpoint.frozen_params import all_arrays
from maxtrain.checkpoint.integrity import survey
from maxtrain.checkpoint.listing import aligned, complete, read_step
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.run_state import RunState, config_of
from maxtrain.config.schema import CheckpointConfig, LoraConfig, ModelConfig, PrecisionConfig
from maxtrain.config.sections.checkpoint import fork_source
from maxtrain.config.words import show
from maxtrain.models.adapt import split_adapters, with_magnitudes, without_adapters
from maxtrain.models.families.directory import read_config
from maxtrain.models.merged import merged
from maxtrain.models.quantized import (
    CODES,
    StoredKernel,
    quantized_among,
    stored_kernels,
    with_whole_kernels,
)
from maxtrain.ops.digest import leaf_names
from maxtrain.parallel.agreement import gather
from maxtrain.storage.reading import readable_model
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.state import abstract_model
from maxtrain.train_step.trainable import join, split_buffers
from maxtrain.weights.hf import differing_keys, load_weights, stored_dtype
from maxtrain.weights.peft import read_adapters
from maxtrain.weights.peft_settings import dropout_note, require_same_settings

# Keys of `model` that determine shapes of arrays.
_SHAPES = {
    "num_layers",
    "embed_dim",
    "mlp_dim",
    # If left open it is mlp_dim, in families without experts, too.
    "moe.expert_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "tie_embeddings",
}
# Keys of adapters that no shape depends on.
_SCALE_OF_ADAPTERS = ("alpha", "scaling")
_TABLE_ROWS = 60
# Maximum length of a chain of runs that began with each other's weights.
_LONGEST_CHAIN = 20
# Name of the head in checkpoints.
_HEAD = "params.head.kernel"
# Name of the value head of PPO, which is always new.
_VALUE = "params.value.kernel"


def _no_more() -> nnx.State:
    raise AssertionError("all weights and adapters of the step are read")


def own_tokenizer(run: str | Path) -> Path | None:
    """Return the folder with the tokenizer that a run carries; None: it is missing or
    incomplete."""
    folder = Path(run).expanduser() / TOKENIZER_FOLDER
    if (folder / CARRIED).exists():
        return folder
    return None


def dtype_of_weights(place: str) -> str | None:
    """Return the type in which another program stored the weights of a model: those of a Hugging
    Face directory, or those that a run was imported from or began with.

    None: it is unknown, or the run began with random weights.
    """
    # The limit stops at a circle of runs, which only a mistake creates; real chains are shorter.
    for _ in range(_LONGEST_CHAIN):
        if is_url(place):
            return None
        directory = Path(place).expanduser()
        try:
            if (directory / "config.json").exists():
                return stored_dtype(directory)
            path = _find_step(directory.absolute(), place)
            if path is None:
                return None
            _, record = read_step(path)
            if "stored_dtype" in record:
                return record["stored_dtype"]
            saved = strict_yaml.loads(config_of(record))
        except (UserError, OSError, ValueError):
            return None
        if not isinstance(saved, dict) or not isinstance(saved.get("checkpoint"), dict):
            return None
        place = saved["checkpoint"].get("init_from") or ""
        if not place:
            place, _ = fork_source(saved["checkpoint"].get("fork_from") or "")
        if not place:
            return None
    return None


def changed_meaning(model: ModelConfig, saved: str) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which this model would interpret the weights of a step differently than
    they were trained.

    Args:
        model: the model that is to have the weights.
        saved: the config of the step, as YAML.

    Returns:
        The keys that differ, by their paths below `model`, with both values. Keys that shapes of
            arrays depend on are checked where the arrays are read, and keys that a run may choose
            are not compared.
    """
    try:
        config = strict_yaml.loads(saved)
    except ValueError:
        return {}
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        return {}
    there = config["model"]
    found = {}
    for key, values in differing_keys(model, there).items():
        if key not in _SHAPES:
            found[key] = values
    adapters = there.get("lora")
    if model.lora.rank is None or not isinstance(adapters, dict):
        return found
    for key in _SCALE_OF_ADAPTERS:
        ours = getattr(model.lora, key)
        theirs = adapters.get(key, ours)
        if ours != theirs:
            found[f"lora.{key}"] = (ours, theirs)
    return found


def require_same_meaning(model: ModelConfig, saved: RunState | None) -> None:
    """Raise ConfigError if a run would continue with another model than the one it has trained.

    Args:
        model: the model of the run as it is launched now.
        saved: the checkpoint that it continues from; None: it begins.
    """
    if saved is None:
        return
    problems = []
    for key, (ours, theirs) in changed_meaning(model, saved.config).items():
        problems.append(
            f"model.{key}={ours} must be {theirs}, as until step {saved.step:,} of {saved.owner}, "
            f"whose weights would mean something else. Set model.{key}={theirs}, or "
            f"{saved.way_out}."
        )
    if problems:
        raise ConfigError(problems)


def require_weights(config: CheckpointConfig) -> None:
    """Check that there are weights to start from, before anything large is read or compiled.

    Args:
        config: section with `init_from`.

    Raises:
        ConfigError: there is no run, checkpoint or Hugging Face directory of that name.
        StorageError: the run has no complete checkpoint.
    """
    directory = readable_model(config.init_from or "").absolute()
    if _find_step(directory, config.init_from or "") is None:
        _require_directory(directory, config)


def require_same_tokenizer(config: CheckpointConfig, data: TokenShards) -> None:
    """Check that the ids of the data have the same meaning for the weights of a Hugging Face
    directory, or of a run that was imported from one, if that has a tokenizer.

    Args:
        config: section with `init_from`.
        data: data of the run, all made with one tokenizer.

    Raises:
        ConfigError: the tokenizers differ.
    """
    place = _tokenizer_beside(readable_model(config.init_from or ""))
    if place is None:
        return
    theirs = load_tokenizer(place)
    if theirs.sha256 != data.manifest.tokenizer["sha256"]:
        raise ConfigError(
            f"checkpoint.init_from={config.init_from} has another tokenizer, {theirs.describe()}, "
            f"than the data, {tokenizer_of_data(data)}, so that ids would mean different text. "
            f"Prepare the data with `--tokenizer {place}`."
        )


def _tokenizer_beside(directory: Path) -> Path | None:
    """Return the place of the tokenizer beside weights, or None."""
    if (directory / "config.json").exists() and (directory / TOKENIZER).exists():
        return directory
    # The directory may be a run, its folder of checkpoints, or one of the checkpoints.
    for run in (directory, *directory.absolute().parents[:2]):
        if (run / "config.yaml").exists():
            return own_tokenizer(run)
    return None


def starting_variables(
    variables: nnx.State,
    config: CheckpointConfig,
    model: ModelConfig,
    fresh: Callable[[], nnx.State],
    tell: Callable[[str], object] = lambda table: None,
    fresh_adapters: Callable[[], nnx.State] | None = None,
    precision: PrecisionConfig | None = None,
    fresh_score: Callable[[], nnx.State] = _no_more,
) -> nnx.State:
    """Return the parameters and buffers of `config.init_from` as arrays, and adapters: those of the
    named run, if it has some, or else new ones. A model without adapters begins with weights into
    which those of the run are merged; one with a score, with those of a model of logits without its
    head.

    Args:
        variables: variables of the model, as shapes with shardings.
        config: section with `init_from` and `init_partial`.
        model: configuration of the model.
        fresh: makes initial variables; called only if some of them are needed.
        tell: called with a table of the variables that were loaded, are new, or were not used.
        fresh_adapters: makes initial adapters; None: the model has none.
        precision: precision of the model; None: the default.
        fresh_score: makes an initial score; called only if it is needed.

    Raises:
        ConfigError: another model, adapters that do not fit, or parameters that differ and are not
            named by `init_partial`.
        StorageError, DataError: the directory can't be read or is not valid.
    """
    directory = readable_model(config.init_from or "").absolute()
    path = _find_step(directory, config.init_from or "")
    theirs = _adapters_of(path)
    _require_fitting_adapters(path, theirs, config, model)
    if theirs is not None and fresh_adapters is None:
        named = dataclasses.replace(config, init_from=str(path))
        adapted = dataclasses.replace(model, lora=theirs)
        return _taken_in(
            variables, named, adapted, precision or PrecisionConfig(), tell, fresh_score
        )
    if fresh_adapters is not None and theirs is None:
        base, _ = split_adapters(variables)

        def fresh_base() -> nnx.State:
            return split_adapters(fresh())[0]

        plain = dataclasses.replace(model, lora=without_adapters(model.lora))
        loaded = starting_variables(base, config, plain, fresh_base, tell, fresh_score=fresh_score)
        if config.init_adapters is not None:
            _, adapters = split_adapters(variables)
            place = Path(config.init_adapters)
            found = read_adapters(place, adapters, model)
            note = dropout_note(place, model.lora)
            if note:
                tell(note)
            return join(loaded, found)
        return with_magnitudes(join(loaded, fresh_adapters()))
    _require_agreement(path, config)
    new_score = nnx.State({})
    without_head = model.score and not _has_score(path, directory)
    if without_head:
        new_score = fresh_score()
        model = dataclasses.replace(model, score=False)
        _, variables = split_score(variables)
        tell("The score of the model is new; no head is read.")
    if path is None:
        _require_directory(directory, config)
        loaded = load_weights(variables, directory, model, tell, without_head=without_head)
        return join(loaded, new_score)
    commit, record = read_step(path)
    _require_same_model(path, record, config, model)
    names = _names_in_checkpoints(variables)
    leaves, treedef = jax.tree.flatten(variables)
    wanted = dict(zip(names, leaves, strict=True))
    arrays_there = all_arrays(path, commit)
    of_model = ("params.", "buffers.")
    there = {name: array for name, array in arrays_there.items() if name.startswith(of_model)}
    there.pop(_VALUE, None)
    if without_head:
        there.pop(_HEAD, None)
    quantized = {}
    for name, kernel in stored_kernels(variables).items():
        # A run whose base is quantised has codes and scales in the place of the kernel.
        if f"params.{name}.{CODES}" not in there:
            quantized[f"params.{name}"] = kernel
    wanted = with_whole_kernels(wanted, quantized)
    loaded = _compare(path, wanted, there, config, tell, quantized)
    arrays = _restore(path, loaded, config, quantized)
    if arrays.keys() != set(names):
        initial = fresh()
        if without_head:
            _, initial = split_score(initial)
        arrays = dict(zip(names, jax.tree.leaves(initial), strict=True)) | arrays
    loaded_variables = jax.tree.unflatten(treedef, [arrays[name] for name in names])
    return join(loaded_variables, new_score)


def split_value(variables: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split the variables of a model into its value head and all others."""

    def is_value(path: tuple[Any, ...], _: Any) -> bool:
        return path[0] == "value"

    value, others = nnx.split_state(variables, is_value, ...)
    return value, others


def split_score(variables: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Split the variables of a model into its score head and all others."""

    def is_score(path: tuple[Any, ...], _: Any) -> bool:
        return path[0] == "score"

    score, others = nnx.split_state(variables, is_score, ...)
    return score, others


def _has_score(path: Path | None, directory: Path) -> bool:
    """Return True if weights are of a model with a score.

    Args:
        path: path of the step that has them; None: they are those of Hugging Face.
        directory: the directory of the latter.
    """
    if path is None:
        return read_config(directory).score
    _, record = read_step(path)
    return bool(_saved_model(path, record).get("score", False))


def _require_fitting_adapters(
    path: Path | None, theirs: LoraConfig | None, config: CheckpointConfig, model: ModelConfig
) -> None:
    """Check the adapters of `init_from` and `init_adapters`, before anything large is read.

    Args:
        path: path of the step that the run begins with; None: it begins with none.
        theirs: `model.lora` of that step's run; None: it has no adapters.

    Raises:
        ConfigError: the adapters of `init_from` or `init_adapters` are not those that `model.lora`
            describes.
        DataError: `init_adapters` has none.
    """
    if path is not None and theirs is not None:
        problems = list(_problems_of_adapters(path, theirs, config, model.lora))
        if problems:
            raise ConfigError(problems)
    if config.init_adapters is not None and model.lora.rank is not None:
        require_same_settings(Path(config.init_adapters), model.lora)


def _problems_of_adapters(
    path: Path, theirs: LoraConfig, config: CheckpointConfig, ours: LoraConfig
) -> Iterator[str]:
    """Yield the reasons for which a run can't begin from a step with these adapters."""
    whole = "the directory of `maxtrain export`, whose weights have taken the adapters in"
    if ours.rank is None:
        if config.init_partial:
            yield (
                f"checkpoint.init_partial={list(config.init_partial)} is not for {path}, which has "
                f"adapters (model.lora.rank={theirs.rank}). Set model.lora.rank={theirs.rank}, or "
                "begin with a run that `maxtrain import` makes of what `maxtrain export` writes."
            )
        return
    if config.init_adapters is not None:
        yield (
            f"checkpoint.init_adapters={config.init_adapters} would replace the adapters of {path} "
            f"(model.lora.rank={theirs.rank}). Leave it out to go on with those, or set "
            f"checkpoint.init_from to what they are for, or to {whole}."
        )
        return
    there = dataclasses.asdict(theirs)
    for key, value in dataclasses.asdict(ours).items():
        # Dropout affects how adapters are trained, not what they compute.
        if value != there[key] and key != "dropout":
            was = show(there[key])
            yield (
                f"model.lora.{key}={show(value)} must be {was}, as of the adapters in {path}. Set "
                f"model.lora.{key}={was} to go on with them. For new adapters, set "
                f"checkpoint.init_from to {whole}."
            )


def _adapters_of(path: Path | None) -> LoraConfig | None:
    """Return the section `model.lora` of the run of a step; None: it has no adapters, or there is
    no step."""
    if path is None:
        return None
    _, record = read_step(path)
    there = _saved_model(path, record).get("lora")
    if not isinstance(there, dict) or there.get("rank") is None:
        return None
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    found = {key: value for key, value in there.items() if key in known}
    if "targets" in found:
        found["targets"] = tuple(found["targets"])
    return LoraConfig(**found)


def _taken_in(
    variables: nnx.State,
    config: CheckpointConfig,
    adapted: ModelConfig,
    precision: PrecisionConfig,
    tell: Callable[[str], object],
    fresh_score: Callable[[], nnx.State],
) -> nnx.State:
    """Return the parameters and buffers of a step with its adapters merged into the weights.

    Args:
        variables: variables of the model without adapters, as shapes with shardings.
        config: section with the step as `init_from`.
        adapted: the model with the adapters of the step.
        precision: precision of both models.
        tell, fresh_score: as in `starting_variables`.
    """
    mesh = jax.tree.leaves(variables)[0].sharding.mesh
    graphdef, abstract = abstract_model(adapted, precision, mesh)

    loaded = starting_variables(
        abstract, config, adapted, _no_more, tell, _no_more, precision, fresh_score
    )
    tell(
        f"The adapters of {config.init_from} (model.lora.rank={adapted.lora.rank}) are taken into "
        "the weights."
    )
    weights = nnx.state(merged(nnx.merge(graphdef, loaded)))

    def placed(array: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(array, leaf.sharding)

    return jax.tree.map(placed, weights, variables)


def _names_in_checkpoints(variables: nnx.State) -> list[str]:
    """Return the names in checkpoints of a model's parameters and buffers, in the order of its
    leaves."""
    buffers = paths(split_buffers(variables)[1])
    names = []
    for name in leaf_names(variables):
        kind = "buffers" if name in buffers else "params"
        names.append(f"{kind}.{name}")
    return names


def _require_agreement(path: Path | None, config: CheckpointConfig) -> None:
    """Raise ConfigError if the processes of this job find different steps."""
    step = "no step"
    if path is not None:
        step = path.name
    found = {report["step"] for report in gather({"step": step})}
    if len(found) > 1:
        raise ConfigError(
            f"checkpoint.init_from={config.init_from} is still being written: processes of this "
            f"job find {', '.join(sorted(found))} there. Name one step of it."
        )


def _restore(
    path: Path,
    loaded: dict[str, jax.ShapeDtypeStruct],
    config: CheckpointConfig,
    quantized: Mapping[str, StoredKernel],
) -> dict[str, Any]:
    """Return the requested arrays of a step; kernels are quantised one by one and replaced by their
    codes and scales."""
    together = {name: leaf for name, leaf in loaded.items() if name not in quantized}
    alone = [{name: leaf} for name, leaf in loaded.items() if name in quantized]
    checkpoints = Checkpoints(path.parent, CheckpointConfig())
    try:
        arrays = {}
        for leaves in (together, *alone):
            if leaves:
                found, _ = checkpoints.restore(leaves, int(path.name), partial=True)
                arrays |= quantized_among(found, quantized)
        return arrays
    except DamagedError as damage:
        # The checkpoint is of another run, whose checkpoints must not be moved aside.
        raise StorageError(f"checkpoint.init_from={config.init_from}: {damage}") from damage
    finally:
        checkpoints.close()


def _find_step(directory: Path, name: str) -> Path | None:
    """Find the checkpoint that a name means.

    Args:
        directory: a checkpoint, a run (its newest checkpoint is meant), or its folder of
            checkpoints.
        name: the name as the user wrote it.

    Returns:
        The directory of the step; None: this is neither a run nor one of its checkpoints.

    Raises:
        ConfigError: a named checkpoint is missing or not complete.
        StorageError: a run has no complete checkpoint.
    """
    # A run may have a number as its name.
    if directory.name.isdecimal() and not (directory / "checkpoints").is_dir():
        steps = complete(directory.parent)
        found = steps.get(int(directory.name))
        # Match the number: the names of steps have leading zeros, which users leave out.
        if found is not None:
            return found
        why = survey(directory.parent).get(int(directory.name), "there is no such step")
        if steps or (directory / "commit.json").exists():
            known = ", ".join(map(str, steps.values())) or "none"
            raise ConfigError(
                f"checkpoint.init_from={name} is not a complete checkpoint: {why}. Old steps are "
                f"removed as checkpoint.keep says. Complete steps: {known}. Name one of these, or "
                "the run for its newest step."
            )
    folder = directory
    if (directory / "checkpoints").is_dir():
        folder = directory / "checkpoints"
    steps = complete(folder)
    if steps:
        return steps[max(steps)]
    # A Hugging Face directory may have a config.yaml of its own.
    is_run = folder != directory or (directory / "config.yaml").exists()
    if is_run and not (directory / "config.json").exists():
        raise StorageError(
            f"checkpoint.init_from={name} is a run without a complete checkpoint. "
            "Wait for its first checkpoint, or name another run."
        )
    return None


def _saved_model(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the section `model` of the config in the record of a step; empty if it has none.

    Raises:
        DamagedError: the config is not valid YAML.
    """
    try:
        config = strict_yaml.loads(config_of(record))
    except ValueError as error:
        raise DamagedError(path, f"its record's config is not valid YAML ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        return {}
    return config["model"]


def _require_same_model(
    path: Path, record: dict[str, Any], config: CheckpointConfig, model: ModelConfig
) -> None:
    """Raise ConfigError for keys of the model that differ; with `init_partial`, keys that determine
    shapes are checked by the shapes."""
    there = _saved_model(path, record)
    problems = [
        f"model.{key}={ours} must be {theirs}, as in {path}. Set model.{key}={theirs}."
        for key, (ours, theirs) in differing_keys(model, there).items()
        if not (config.init_partial and key in _SHAPES)
    ]
    if problems:
        raise ConfigError(problems)


def _require_directory(directory: Path, config: CheckpointConfig) -> None:
    """Check a model that is not a run of maxtrain. Raise ConfigError if it is missing, or if
    checkpoint.init_partial, which is for runs only, is set."""
    if config.init_partial:
        raise ConfigError(
            f"checkpoint.init_partial={list(config.init_partial)} is for a run of maxtrain, "
            f"and checkpoint.init_from={config.init_from} is none. Set "
            "checkpoint.init_partial=[]."
        )
    if (directory / "config.json").exists():
        return
    run, _, step = (config.init_from or "").rpartition("@")
    if run and step.isdecimal():
        raise ConfigError(
            f"checkpoint.init_from={config.init_from} is not there. A step of a run is named by "
            f"its folder: set checkpoint.init_from={run}/checkpoints/{int(step):08d}."
        )
    what = "is not there"
    if directory.exists():
        what = "has neither checkpoints nor config.json"
    raise ConfigError(
        f"checkpoint.init_from={config.init_from} {what}. Name a run, one of its checkpoints, such "
        "as RUN/checkpoints/00000100, or a Hugging Face directory."
        f"{download_hint(config.init_from)}"
    )


def _compare(
    path: Path,
    wanted: dict[str, jax.ShapeDtypeStruct],
    there: dict[str, dict[str, Any]],
    config: CheckpointConfig,
    tell: Callable[[str], object],
    quantized: Mapping[str, StoredKernel],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays that can be loaded. Reports a table of all, and raises ConfigError with it
    if more differs than is allowed."""
    ours = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()}
    theirs = {name: f"{array['dtype']}{array['shape']}" for name, array in there.items()}
    allowed = [re.compile(pattern) for pattern in config.init_partial]
    rows = []
    refused = 0
    for name in sorted(ours | theirs):
        short = name.removeprefix("params.").removeprefix("buffers.")
        same = ours.get(name) == theirs.get(name)
        may_differ = any(pattern.search(short) for pattern in allowed)
        if same:
            what = "loaded"
        elif not may_differ:
            what = "DIFFERS"
            refused += 1
        elif name in ours:
            what = "new"
        else:
            what = "not used"
        here = ours.get(name, "missing")
        if same and name in quantized:
            here = quantized[name].describe()
        rows.append((short, theirs.get(name, "missing"), here, what))
    count = sum(what == "loaded" for _, _, _, what in rows)
    # Rows of arrays that are not loaded come first.
    rows.sort(key=_is_loaded)
    lines = aligned([("parameter", "there", "here", ""), *rows])[: _TABLE_ROWS + 1]
    hidden = len(rows) + 1 - len(lines)
    if hidden:
        lines.append(f"    ... and {hidden} more")
    text = (
        f"weights of {url_of(path) or path}: {count} of {len(ours)} parameters loaded\n"
        + "\n".join(lines)
    )
    if refused:
        raise ConfigError(
            f"checkpoint.init_from={config.init_from} has other parameters. {text}\nChange the "
            "model, or name what may differ in checkpoint.init_partial, such as "
            "checkpoint.init_partial='[head]'."
        )
    tell(text)
    return {name: leaf for name, leaf in wanted.items() if ours[name] == theirs.get(name)}


def _is_loaded(row: tuple[str, str, str, str]) -> bool:
    return row[3] == "loaded"
