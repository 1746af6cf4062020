"""The model that a command works on: that of a run, or of a Hugging Face directory.

`generate`, `score`, `serve` and `evaluate` share the arguments that name it, and how it is loaded.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.base.hub import download_hint
from data_pipeline.tokenizer import (
    TOKENIZER_FOLDER,
    Carried,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
)
from maxtrain.checkpoint.listing import complete, read_record
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.run_state import config_of, tokenizer_of
from maxtrain.config.load import load_config
from maxtrain.config.schema import MeshConfig, ModelConfig, RunConfig
from maxtrain.models.decoder import Decoder
from maxtrain.models.families.directory import read_config
from maxtrain.parallel.mesh import make_mesh
from maxtrain.storage.reading import readable
from maxtrain.train_step.state import abstract_model
from maxtrain.train_step.trainable import join, split, split_buffers
from maxtrain.trainer.run_dir import CONFIG as RUN_CONFIG
from maxtrain.trainer.run_dir import require_own_config, runs_beside, why_no_run
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.start import changed_meaning, own_tokenizer

STEP_HELP = "checkpoint of RUN (default: the newest)"
# What a Hugging Face directory has, and a run has not.
HF_CONFIG = "config.json"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments RUN or DIR, --hf, --dtype and --step."""
    add = parser.add_argument
    add(
        "run",
        metavar="RUN|DIR",
        nargs="?",
        help="directory or URL of a training run, or a Hugging Face directory with config.json, "
        "weights and tokenizer.json",
    )
    add("--hf", metavar="DIR", help="the same as DIR: what is there must be of Hugging Face")
    add(
        "--dtype",
        type=parameter_dtype,
        choices=["float32", "bfloat16"],
        help="number format for DIR (default: float32)",
    )
    add("--step", metavar="N", type=int, help=STEP_HELP)


def parameter_dtype(text: str) -> str:
    """The argument --dtype of a model that is read; what it may be is for `choices` to say."""
    if text == "float16":
        raise argparse.ArgumentTypeError(
            "float16 is no number format of parameters here. Leave --dtype out: float32 holds "
            "every number of float16, and `maxtrain export --dtype float16` writes the same bits"
        )
    return text


def check_model_arguments(
    parser: argparse.ArgumentParser, asked: argparse.Namespace, role: str
) -> None:
    """Ends the program, or raises UsageError, if they don't name one model. Then one of `run` and
    `hf` is set, whichever kind of directory the model is in.

    Args:
        parser: that read the arguments.
        asked: what it read.
        role: what the model does in this command, as in "generates".
    """
    if (asked.run is None) == (asked.hf is None):
        parser.error(f"name what {role}: either RUN or DIR, a directory")
    if asked.hf is not None:
        _require_weights(asked.hf)
    else:
        asked.run = str(readable(asked.run))
    if asked.hf is None and _is_of_hugging_face(asked.run):
        asked.hf = asked.run
        asked.run = None
    if asked.hf is not None and asked.step is not None:
        raise UsageError(
            f"--step {asked.step}: is a checkpoint of a run, but {asked.hf}, which {role}, is a "
            "Hugging Face directory. Leave it out, or name a run."
        )
    if asked.run is not None and asked.dtype is not None:
        raise UsageError(
            f"--dtype {asked.dtype}: is of Hugging Face directories, and the run {asked.run} has "
            "its own. Leave it out."
        )
    check_step(asked.step)


def _is_of_hugging_face(place: str) -> bool:
    """Whether a directory is one of Hugging Face, else it is a run; UsageError: it is neither."""
    directory = Path(place).expanduser()
    if (directory / HF_CONFIG).exists():
        return True
    if not (directory / RUN_CONFIG).exists():
        what = why_no_run(directory, RUN_CONFIG, HF_CONFIG)
        raise UsageError(
            f"{place}: {what}. Name the directory of a run, such as {runs_beside(directory)}, or "
            f"a Hugging Face directory with {HF_CONFIG}.{download_hint(place)}"
        )
    return False


def _require_weights(place: str) -> None:
    """UsageError: a directory is not one of Hugging Face."""
    directory = Path(place).expanduser()
    if not (directory / HF_CONFIG).exists():
        what = why_no_run(directory, HF_CONFIG)
        raise UsageError(
            f"--hf {place}: {what}. Name a directory with {HF_CONFIG}, weights and tokenizer.json, "
            "as downloaded from Hugging Face or written by `maxtrain export`."
            f"{download_hint(place)}"
        )


def check_step(step: int | None) -> None:
    """UsageError: --step is no number of a step."""
    if step is not None and step < 0:
        raise UsageError(
            f"--step {step}: must be at least 0. Leave it out for the newest checkpoint."
        )


def tell_on_stderr(line: str) -> None:
    """A line beside what a command prints."""
    print(line, file=sys.stderr, flush=True)


def load_model(asked: argparse.Namespace, mesh: Mesh | None = None) -> tuple[Decoder, Tokenizer]:
    """The model that the arguments name, and its tokenizer; `mesh` and errors as of `load_run`.

    UsageError: it is a reward model, which has no logits.
    """
    if asked.hf is None:
        model, tokenizer = load_run(asked.run, asked.step, mesh)
    else:
        tokenizer = load_tokenizer(asked.hf)
        # Before the weights are read.
        require_fitting_tokenizer(asked.hf, tokenizer, read_config(asked.hf))
        model, _ = load_pretrained(asked.hf, asked.dtype or "float32", mesh, tell_on_stderr)
    if model.config.score:
        raise UsageError(
            f"{asked.run or asked.hf}: is a reward model, which scores texts and has no logits. "
            "Name a model of text; what a reward model is worth is in the evaluations of its run."
        )
    return model, tokenizer


def require_fitting_tokenizer(
    directory: str | Path, tokenizer: Tokenizer, model: ModelConfig
) -> None:
    """DataError: texts have ids that the model does not know."""
    entries = model.vocab_size or 0
    if not tokenizer.fits(entries):
        raise DataError(
            f"{directory}: its tokenizer has {tokenizer.vocab_size:,} entries, and the model has "
            f"{entries:,} (model.vocab_size). Get the tokenizer that belongs to the model."
        )


def comes_from_elsewhere(asked: argparse.Namespace) -> bool:
    """Whether the arguments name a model that another program trained, so that texts begin as its
    tokenizer says: a Hugging Face directory, or a run that was made of one."""
    return asked.hf is not None or carried_tokenizer(asked.run).is_imported


def text_beginning(asked: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """The ids that every text is read after: those that a tokenizer of another program puts there,
    or the end of the document before; empty: the tokenizer has none."""
    if comes_from_elsewhere(asked):
        ids = special_beginning(tokenizer)
        if ids:
            return ids
    if tokenizer.eod_id is None:
        return []
    return [tokenizer.eod_id]


def special_beginning(tokenizer: Tokenizer) -> list[int]:
    """The ids that a Hugging Face tokenizer puts before every text."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.inner.encode("", add_special_tokens=True).ids
    return []


def read_run_config(directory: str | Path) -> RunConfig:
    """The config that a run was last launched with; UserError: `directory` is not a run, or
    something is wrong with it."""
    return load_config([_own_config(directory)])


def config_of_step(directory: str | Path, step: int | None) -> RunConfig:
    """The config that a run was last launched with, whose `model` is what the weights of a step
    (None: the newest) were trained as, even if the launch said otherwise.

    Raises:
        UserError: as of `read_run_config`, or the step can't be read.
    """
    words = [_own_config(directory)]
    config = load_config(words)
    steps = complete(Path(directory).expanduser() / "checkpoints")
    wanted = step_of(directory, step)
    if wanted not in steps:
        return config
    changed = changed_meaning(config.model, config_of(read_record(steps[wanted])))
    if not changed:
        return config
    for key, (_, of_step) in changed.items():
        value = of_step
        if not isinstance(of_step, str):
            value = json.dumps(of_step)
        words.append(f"model.{key}={value}")
    return load_config(words)


def _own_config(directory: str | Path) -> str:
    """The argument config= for the config of a run; UserError: `directory` is not a run."""
    run = Path(directory).expanduser()
    if not (run / RUN_CONFIG).exists():
        what = why_no_run(run, RUN_CONFIG)
        if (run / HF_CONFIG).exists():
            what = "is a Hugging Face directory"
        raise UsageError(
            f"RUN={run}: {what}. Name the directory of a run, such as {runs_beside(run)}."
            f"{download_hint(directory)}"
        )
    require_own_config(run)
    return f"config={run / RUN_CONFIG}"


def step_of(directory: str | Path, step: int | None) -> int | None:
    """The number of the checkpoint meant: the one asked for, or the newest; None: there is none."""
    if step is not None:
        return step
    return max(complete(Path(directory).expanduser() / "checkpoints"), default=None)


def tokenizer_place(directory: str | Path) -> str:
    """The folder with the tokenizer that a run carries. DataError: it is missing or incomplete."""
    own = own_tokenizer(directory)
    if own is None:
        folder = Path(directory).expanduser() / TOKENIZER_FOLDER
        raise DataError(
            f"{folder}: is missing or incomplete, and {directory} carries its tokenizer there. "
            "Copy it again from where the run was made, or run the training command again where "
            "its data is: it writes the folder anew, also when all steps are done."
        )
    return str(own)


def carried_tokenizer(directory: str | Path) -> Carried:
    """What a run says of its tokenizer and of conversations. DataError: that is missing or
    damaged."""
    return Carried.load(Path(tokenizer_place(directory)))


def load_run_tokenizer(directory: str | Path, step: int | None = None) -> Tokenizer:
    """The tokenizer that a run carries.

    Args:
        directory: of the run.
        step: checkpoint whose model is used with it; None: the newest.

    Raises:
        DataError: it is missing, damaged, or not the one that the checkpoint was trained with.
    """
    place = tokenizer_place(directory)
    tokenizer = load_tokenizer(place)
    path = complete(Path(directory).expanduser() / "checkpoints").get(step_of(directory, step) or 0)
    trained_with = ""
    if path is not None:
        trained_with = tokenizer_of(read_record(path))
    if trained_with not in ("", tokenizer.sha256):
        raise DataError(
            f"{place}: its tokenizer, {tokenizer.describe()}, is not the one that {path} was "
            f"trained with (sha256 {trained_with[:12]}): ids would mean other text. Copy the "
            "folder again from where the run was made."
        )
    return tokenizer


def load_run(
    directory: str | Path, step: int | None = None, mesh: Mesh | None = None
) -> tuple[Decoder, Tokenizer]:
    """The model of a training run at a step (None: the newest checkpoint), and its tokenizer.

    Args:
        directory: of the run, or its URL. The data of the run need not be there.
        step: the checkpoint.
        mesh: that the parameters are split over; None: all on this process's first device.

    Raises:
        UserError: `directory` is not a run, or something is wrong with its config, its checkpoints
            or its tokenizer.
    """
    directory = readable(directory)
    config = config_of_step(directory, step)
    tokenizer = load_run_tokenizer(directory, step)
    require_fitting_tokenizer(directory, tokenizer, config.model)
    if mesh is None:
        mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    # Whoever reads a run wants its model of text.
    plain = dataclasses.replace(config.model, value=False)
    graphdef, variables = abstract_model(plain, config.precision, mesh)
    folder = Path(directory).expanduser() / "checkpoints"
    return nnx.merge(graphdef, restore_variables(folder, config, variables, step)), tokenizer


def restore_variables(
    folder: Path, config: RunConfig, variables: nnx.State, step: int | None
) -> nnx.State:
    """The weights that a run is judged by, the averaged ones if it has them; and its buffers.

    Args:
        folder: of the run's checkpoints.
        config: of the run.
        variables: the model's parameters and buffers, as shapes with shardings.
        step: None for the newest checkpoint.

    Raises:
        UserError: something is wrong with the checkpoint.
    """
    checkpoints = Checkpoints(folder, config.checkpoint)
    try:
        params, buffers = split_buffers(variables)
        wanted = {"params": params, "buffers": buffers}
        if config.optimizer.ema_decay is not None:
            return join(*_averaged(checkpoints, wanted, step).values())
        restored, _ = checkpoints.restore(wanted, step, partial=True)
        return join(*restored.values())
    finally:
        checkpoints.close()


def _averaged(
    checkpoints: Checkpoints, wanted: dict[str, nnx.State], step: int | None
) -> dict[str, nnx.State]:
    """The averaged weights of a step, which are float32, in the types of the parameters.

    Frozen parameters and buffers have no average.
    """
    names = {name.removeprefix("params.") for name in checkpoints.frozen_names(step)}
    trainable, frozen = split(wanted["params"], names)

    def in_float32(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=leaf.sharding)

    def as_asked(average: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return average.astype(leaf.dtype)

    found, _ = checkpoints.restore(
        {
            "opt_state": {"average": jax.tree.map(in_float32, trainable)},
            "params": frozen,
            "buffers": wanted["buffers"],
        },
        step,
        partial=True,
    )
    average = jax.tree.map(as_asked, found["opt_state"]["average"], trainable)
    return {"params": join(average, found["params"]), "buffers": found["buffers"]}
