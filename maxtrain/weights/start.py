"""Weights to start from, of whatever kind: a Hugging Face directory, or a run of maxtrain or one of
its checkpoints.

Parameters alone are read, onto this run's mesh: its optimizer, its data and its steps begin anew.
Nothing is padded, truncated or cast; what may be missing or different, and stays as it was
initialised, is named by `checkpoint.init_partial`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import yaml
from flax import nnx

from data_pipeline.errors import ConfigError, DamagedError, StorageError
from maxtrain.checkpoint.listing import aligned, complete, read_step
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig, ModelConfig
from maxtrain.ops.digest import leaf_names
from maxtrain.parallel.agreement import gather
from maxtrain.weights.hf import differing_keys, load_weights

_TABLE_ROWS = 60


def starting_params(
    params: nnx.State,
    config: CheckpointConfig,
    model: ModelConfig,
    fresh: Callable[[], nnx.State],
    tell: Callable[[str], object] = lambda table: None,
) -> nnx.State:
    """The parameters of `config.init_from` as arrays.

    Args:
        params: the model's, as shapes with shardings.
        config: with `init_from` and `init_partial`.
        model: that `params` belong to.
        fresh: makes initial parameters; called only if some of them are needed.
        tell: gets a table of what was loaded, is new, and was not used.

    Raises:
        ConfigError: another model, or parameters that differ and are not named by `init_partial`.
        StorageError, DataError: the directory is not what it should be.
    """
    directory = Path(config.init_from or "").expanduser().absolute()
    path = _find_step(directory)
    if (
        len(found := {said["step"] for said in gather({"step": path.name if path else "no step"})})
        > 1
    ):
        rule = (
            f"is still being written: processes of this job find {', '.join(sorted(found))} there"
        )
        raise ConfigError(f"checkpoint.init_from={config.init_from} {rule}. Name one step of it.")
    if path is None:
        if config.init_partial:
            rule = f"is for a run of maxtrain, and checkpoint.init_from={config.init_from} is none"
            raise ConfigError(
                f"checkpoint.init_partial={list(config.init_partial)} {rule}. Set checkpoint.init_partial=[]."
            )
        return load_weights(params, directory, model, tell)
    commit, record = read_step(path)
    _require_same_model(path, record, config, model)
    leaves, treedef = jax.tree.flatten(params)
    wanted = dict(zip([f"params.{name}" for name in leaf_names(params)], leaves))
    there = {name: array for name, array in commit["arrays"].items() if name.startswith("params.")}
    loaded = _compare(path, wanted, there, config, tell)
    checkpoints = Checkpoints(path.parent, CheckpointConfig())
    try:
        arrays: dict[str, Any] = (
            checkpoints.restore(loaded, int(path.name), partial=True)[0] if loaded else {}
        )
    except DamagedError as damage:  # of another run, whose checkpoints are not ours to put aside
        raise StorageError(f"checkpoint.init_from={config.init_from}: {damage}") from damage
    finally:
        checkpoints.close()
    if arrays.keys() != wanted.keys():
        arrays = dict(zip(wanted, jax.tree.leaves(fresh()))) | arrays
    return jax.tree.unflatten(treedef, [arrays[name] for name in wanted])


def _find_step(directory: Path) -> Path | None:
    """A step that is named, or the newest of a run or of its folder of checkpoints; None: this is
    no such directory."""
    if directory.name.isdecimal() and (directory / "commit.json").exists():
        return directory
    folder = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    steps = complete(folder)
    if not steps and folder != directory:
        mend = "Wait for its first checkpoint, or name another run"
        raise StorageError(
            f"checkpoint.init_from={directory} is a run without a complete checkpoint. {mend}."
        )
    return steps[max(steps)] if steps else None


def _require_same_model(
    path: Path, record: dict[str, Any], config: CheckpointConfig, model: ModelConfig
) -> None:
    """Raises ConfigError for keys of the model that differ; with `init_partial`, shapes say enough
    of those that make them."""
    there = (yaml.safe_load(record["config"]) if "config" in record else {}).get("model", {})
    shapes = {
        "num_layers",
        "embed_dim",
        "mlp_dim",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "tie_embeddings",
    }
    problems = [
        f"model.{key}={ours} must be {theirs}, as in {path}. Set model.{key}={theirs}."
        for key, (ours, theirs) in differing_keys(model, there).items()
        if not (config.init_partial and key in shapes)
    ]
    if problems:
        raise ConfigError(problems)


def _compare(
    path: Path,
    wanted: dict[str, jax.ShapeDtypeStruct],
    there: dict[str, dict[str, Any]],
    config: CheckpointConfig,
    tell: Callable[[str], object],
) -> dict[str, jax.ShapeDtypeStruct]:
    """What can be loaded; tells a table of all, and raises ConfigError with it if more differs than
    may."""
    ours = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()}
    theirs = {name: f"{array['dtype']}{array['shape']}" for name, array in there.items()}
    allowed = [re.compile(pattern) for pattern in config.init_partial]
    rows, refused = [("parameter", "there", "here", "")], 0
    for name in sorted(ours | theirs):
        short, same = name.removeprefix("params."), ours.get(name) == theirs.get(name)
        bad = not same and not any(pattern.search(short) for pattern in allowed)
        what = "loaded" if same else "not used" if name not in ours else "new"
        rows.append(
            (
                short,
                theirs.get(name, "missing"),
                ours.get(name, "missing"),
                "DIFFERS" if bad else what,
            )
        )
        refused += bad
    count = sum(row[3] == "loaded" for row in rows)
    rows[1:] = sorted(
        rows[1:], key=lambda row: row[3] == "loaded"
    )  # what is of interest comes first
    lines = aligned(rows)[: _TABLE_ROWS + 1]
    lines += [f"    ... and {len(rows) - len(lines)} more"] * (len(rows) > len(lines))
    text = f"weights of {path}: {count} of {len(ours)} parameters loaded\n" + "\n".join(lines)
    if refused:
        mend = "Change the model, or name what may differ in checkpoint.init_partial, such as checkpoint.init_partial='[head]'"
        raise ConfigError(
            f"checkpoint.init_from={config.init_from} has other parameters. {text}\n{mend}."
        )
    tell(text)
    return {name: leaf for name, leaf in wanted.items() if ours[name] == theirs.get(name)}
