"""The model that a command works on: of a run, or of a Hugging Face directory.

`generate`, `score`, `serve` and `evaluate` share these arguments and loaders.
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
    JsonTokenizer,
    Tokenizer,
    TokenizerRecord,
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
# A Hugging Face directory has this file, a run has not.
HF_CONFIG = "config.json"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RUN or DIR, --hf, --dtype and --step."""
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
    """Parse the argument --dtype. argparse's `choices` checks its value."""
    if text == "float16":
        raise argparse.ArgumentTypeError(
            "float16 is no number format of parameters here. Leave --dtype out: float32 holds "
            "every number of float16, and `maxtrain export --dtype float16` writes the same bits"
        )
    return text


def check_model_arguments(
    parser: argparse.ArgumentParser, args: argparse.Namespace, role: str
) -> None:
    """End the program, or raise a UsageError, if the arguments do not name one model. Afterwards
    exactly one of `run` and `hf` is set.

    Args:
        parser: the parser that read the arguments.
        args: the parsed arguments.
        role: a verb for what the model does in this command, such as "generates".
    """
    if (args.run is None) == (args.hf is None):
        parser.error(f"name what {role}: either RUN or DIR, a directory")
    if args.hf is not None:
        _require_weights(args.hf)
    else:
        args.run = str(readable(args.run))
    if args.hf is None and _is_of_hugging_face(args.run):
        args.hf = args.run
        args.run = None
    if args.hf is not None and args.step is not None:
        raise UsageError(
            f"--step {args.step}: is a checkpoint of a run, but {args.hf}, which {role}, is a "
            "Hugging Face directory. Leave it out, or name a run."
        )
    if args.run is not None and args.dtype is not None:
        raise UsageError(
            f"--dtype {args.dtype}: is of Hugging Face directories, and the run {args.run} has "
            "its own. Leave it out."
        )
    check_step(args.step)


def _is_of_hugging_face(place: str) -> bool:
    """Return whether a directory is a Hugging Face directory; otherwise it is a run. Raise a
    UsageError if it is neither."""
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
    """Raise a UsageError if a directory is not a Hugging Face directory."""
    directory = Path(place).expanduser()
    if not (directory / HF_CONFIG).exists():
        what = why_no_run(directory, HF_CONFIG)
        raise UsageError(
            f"--hf {place}: {what}. Name a directory with {HF_CONFIG}, weights and tokenizer.json, "
            "as downloaded from Hugging Face or written by `maxtrain export`."
            f"{download_hint(place)}"
        )


def check_step(step: int | None) -> None:
    """Raise a UsageError if --step is not the number of a step."""
    if step is not None and step < 0:
        raise UsageError(
            f"--step {step}: must be at least 0. Leave it out for the newest checkpoint."
        )


def print_on_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def load_model(args: argparse.Namespace, mesh: Mesh | None = None) -> tuple[Decoder, Tokenizer]:
    """Load the model that the arguments name, and its tokenizer; `mesh` and errors as for
    `load_run`.

    Raises a UsageError if it is a reward model, which has no logits.
    """
    if args.hf is None:
        model, tokenizer = load_run(args.run, args.step, mesh)
    else:
        tokenizer = load_tokenizer(args.hf)
        # Check before the weights are read, which takes long.
        require_fitting_tokenizer(args.hf, tokenizer, read_config(args.hf))
        model, _ = load_pretrained(args.hf, args.dtype or "float32", mesh, print_on_stderr)
    if model.config.score:
        raise UsageError(
            f"{args.run or args.hf}: is a reward model, which scores texts and has no logits. "
            "Name a model of text; what a reward model is worth is in the evaluations of its run."
        )
    return model, tokenizer


def require_fitting_tokenizer(
    directory: str | Path, tokenizer: Tokenizer, model: ModelConfig
) -> None:
    """Raise a DataError if the tokenizer has ids that the model does not know."""
    entries = model.vocab_size or 0
    if not tokenizer.fits(entries):
        raise DataError(
            f"{directory}: its tokenizer has {tokenizer.vocab_size:,} entries, and the model has "
            f"{entries:,} (model.vocab_size). Get the tokenizer that belongs to the model."
        )


def comes_from_elsewhere(args: argparse.Namespace) -> bool:
    """Return whether the model was trained by another program, so that texts begin as its tokenizer
    requires: a Hugging Face directory, or a run that was imported from one."""
    return args.hf is not None or carried_tokenizer(args.run).is_imported


def text_beginning(args: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that precede every text: those of another program's tokenizer, or the
    end-of-document id; empty: there are none."""
    if comes_from_elsewhere(args):
        ids = special_beginning(tokenizer)
        if ids:
            return ids
    if tokenizer.eod_id is None:
        return []
    return [tokenizer.eod_id]


def special_beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a Hugging Face tokenizer puts before every text."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.inner.encode("", add_special_tokens=True).ids
    return []


def read_run_config(directory: str | Path) -> RunConfig:
    """Read the config that a run was last launched with. Raise a UsageError if `directory` is not a
    run, or another UserError if the config is invalid."""
    return load_config([_own_config(directory)])


def config_of_step(directory: str | Path, step: int | None) -> RunConfig:
    """Return the config of a run's last launch, with `model` as the weights of a step (None: the
    newest) were trained.

    Raises:
        UserError: as for `read_run_config`, or the step cannot be read.
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
    """Return the argument config= for the config of a run. Raise a UsageError if `directory` is not
    a run."""
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
    """Return the step of the given or newest checkpoint; None: there is none."""
    if step is not None:
        return step
    return max(complete(Path(directory).expanduser() / "checkpoints"), default=None)


def tokenizer_place(directory: str | Path) -> str:
    """Return the folder with the tokenizer that a run carries. Raise a DataError if it is missing
    or incomplete."""
    own = own_tokenizer(directory)
    if own is None:
        folder = Path(directory).expanduser() / TOKENIZER_FOLDER
        raise DataError(
            f"{folder}: is missing or incomplete, and {directory} carries its tokenizer there. "
            "Copy it again from where the run was made, or run the training command again where "
            "its data is: it writes the folder anew, also when all steps are done."
        )
    return str(own)


def carried_tokenizer(directory: str | Path) -> TokenizerRecord:
    """Return the record of a run's tokenizer and chat template. Raise a DataError if it is missing
    or damaged."""
    return TokenizerRecord.load(Path(tokenizer_place(directory)))


def load_run_tokenizer(directory: str | Path, step: int | None = None) -> Tokenizer:
    """Load the tokenizer that a run carries.

    Args:
        directory: the folder of the run.
        step: the checkpoint whose model is used with the tokenizer; None: the newest.

    Raises:
        DataError: the tokenizer is missing, damaged, or not the one that the checkpoint was trained
            with.
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
    """Load the model of a training run at a step (None: the newest checkpoint), and its tokenizer.

    Args:
        directory: the folder or URL of the run. The data of the run is not needed.
        step: the checkpoint.
        mesh: the mesh that the parameters are sharded over; None: this process's first device.

    Raises:
        UserError: `directory` is not a run, or its config, checkpoints or tokenizer are invalid.
    """
    directory = readable(directory)
    config = config_of_step(directory, step)
    tokenizer = load_run_tokenizer(directory, step)
    require_fitting_tokenizer(directory, tokenizer, config.model)
    if mesh is None:
        mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    # Commands use the language model, without its value head.
    plain = dataclasses.replace(config.model, value=False)
    graphdef, variables = abstract_model(plain, config.precision, mesh)
    folder = Path(directory).expanduser() / "checkpoints"
    return nnx.merge(graphdef, restore_variables(folder, config, variables, step)), tokenizer


def restore_variables(
    folder: Path, config: RunConfig, variables: nnx.State, step: int | None
) -> nnx.State:
    """Restore the weights that a run is evaluated with (the averaged ones if it has them), and its
    buffers.

    Args:
        folder: the folder of the run's checkpoints.
        config: the config of the run.
        variables: the model's parameters and buffers, as abstract arrays with shardings.
        step: None for the newest checkpoint.

    Raises:
        UserError: the checkpoint is missing, damaged or does not fit.
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
    """Restore the averaged weights of a step, which are float32, in the types of the parameters.

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
