"""`maxtrain export RUN OUT`: a trained model as files that other programs load.

The files are written into a hidden directory beside OUT, read again, and compared with the run: all
parameters bit for bit, and logits on a few tokens. Only then does the directory get the name
OUT, so that an export that is killed leaves nothing that looks finished.
"""

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from data_pipeline.base.errors import StorageError, UsageError, run_command
from data_pipeline.chat.chat import CHATML
from data_pipeline.shards import write_atomic
from data_pipeline.tokenizer import Tokenizer
from maxtrain.commands.export import model_card
from maxtrain.commands.export.gguf import export_gguf, require_suffix
from maxtrain.commands.export.peft import (
    TokenizerFiles,
    export_adapters,
    require_base_as_it_was,
)
from maxtrain.commands.verify import forget_arrays, logits, some_tokens
from maxtrain.config.schema import MeshConfig, ObserveConfig, RunConfig
from maxtrain.config.words import choices
from maxtrain.models.decoder import Decoder
from maxtrain.models.merged import merged
from maxtrain.ops.digest import tree_digests
from maxtrain.parallel.distributed import start
from maxtrain.parallel.mesh import make_mesh
from maxtrain.storage.publish import publishing, require_free, require_no_file
from maxtrain.storage.reading import readable, require_no_url
from maxtrain.train_step.state import abstract_model
from maxtrain.trainer.forks import starting_weights
from maxtrain.trainer.saved_run import (
    STEP_HELP,
    check_step,
    load_run,
    print_on_stderr,
    read_run_config,
    step_of,
    tokenizer_place,
)
from maxtrain.weights.gguf.file import QUANTS, library
from maxtrain.weights.hf import load_weights
from maxtrain.weights.hf_export import (
    DTYPES,
    SETTINGS,
    file_sizes,
    rounded,
    write_config,
    write_tokenizer,
    write_weights,
)
from maxtrain.weights.start import dtype_of_weights

# The options of each format.
_OPTIONS = {
    "hf": ("dtype", "max_shard_size", "chat_template"),
    "gguf": ("quant", "pre_tokenizer", "chat_template"),
    "peft": ("chat_template",),
}
# How a GGUF file stores parameters without rounding them.
_QUANT_OF = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
MAX_SHARD_BYTES = 5 * 10**9
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


class RoundTripCheck(NamedTuple):
    """Result of reading the files again."""

    # Largest difference of the logits from those of the run; 0 unless numbers were rounded.
    difference: float
    # Largest magnitude of the run's logits, for comparison.
    largest: float


class ExportResult(NamedTuple):
    """Result of an export."""

    files: dict[str, int]  # bytes by name
    notes: list[str]  # notes for the user about the tokenizer
    verified: RoundTripCheck


def export(
    model: Decoder,
    tokenizer: Tokenizer,
    place: str,
    out: Path,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    template: bytes | None = None,
    card: str | None = None,
    tell: Callable[[str], object] = print,
) -> ExportResult:
    """Write a model as a Hugging Face directory, and see that it reads back as what it is.

    The model's arrays are given up: while the files are read again, they are not in memory.

    Args:
        model: with its parameters, all on this process's devices.
        tokenizer: that belongs to it.
        place: as for `load_tokenizer`, from where the tokenizer came.
        out: the directory to be made; an empty one may be there.
        dtype: of the tensors; None: of the parameters.
        max_shard_bytes: of the tensors in one file.
        template: a chat template; None: the one beside the tokenizer, if there is one.
        card: text of a README.md; None: there is none.
        tell: gets a line for each of several shards.

    Raises:
        UsageError: `out` is there, and is not an empty directory.
        DataError: a parameter is not finite in `dtype`.
        StorageError: what was read back is not what was written.
    """
    out = Path(os.path.abspath(out))
    dtype = dtype or model.precision.params
    with publishing(out, "export") as directory:
        notes = write_tokenizer(directory, place, tokenizer, model.config, template)
        write_config(directory, model.config, dtype, tokenizer)
        if card is not None:
            write_atomic(directory / model_card.NAME, card.encode())
        _, params = nnx.split(model)
        write_weights(directory, params, model.config, dtype, max_shard_bytes, tell)
        verified = _verify(directory, out, model, dtype)
        files = file_sizes(directory)
    return ExportResult(files, notes, verified)


def _verify(directory: Path, out: Path, model: Decoder, dtype: str) -> RoundTripCheck:
    """Read the files for `out` again, and hold them against the model, whose arrays are given up.

    Raises:
        StorageError: a parameter or a logit is not the same bit for bit, or, where numbers were
            rounded, not that of the rounded parameters.
    """
    _, params = nnx.split(model)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    # Whatever kernel the run has: one that takes rows of any length.
    plain = dataclasses.replace(model.config, attention="xla")
    graphdef, abstract = abstract_model(plain, model.precision, mesh)
    tokens = some_tokens(model.config)
    exact = np.asarray(logits(graphdef, params, tokens))
    params = rounded(params, dtype, model.config)
    expected = np.asarray(logits(graphdef, params, tokens))
    digests = tree_digests(params)
    forget_arrays(nnx.state(model))
    del params
    loaded = load_weights(abstract, directory, plain)
    found = np.asarray(logits(graphdef, loaded, tokens))
    different = [name for name, digest in tree_digests(loaded).items() if digest != digests[name]]
    if different or found.tobytes() != expected.tobytes():
        what = f"{len(different)} parameters ({', '.join(different[:3])}) differ"
        if not different:
            what = f"logits differ by up to {np.abs(found - expected).max():.3g}"
        raise StorageError(
            f"OUT={out}: what is read back is not what was written: {what}. Nothing was "
            "exported. Look at the disk that it is on, then run the same command again."
        )
    return RoundTripCheck(float(np.abs(found - exact).max()), float(np.abs(exact).max()))


def _shard_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?((?:[KMG]i?)?)B?", text, re.IGNORECASE)
    size = 0
    if match:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes. Write for example 5GB or 500MB"
        )
    return size


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """The argument --max-shard-size."""
    parser.add_argument(
        "--max-shard-size",
        metavar="BYTES",
        type=_shard_bytes,
        help="largest size of a file of tensors, such as 500MB (default: 5GB)",
    )


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="directory of a training run")
    add("out", metavar="OUT", type=Path, help="directory to be made")
    add(
        "--format",
        choices=list(_OPTIONS),
        default="hf",
        help="hf: what transformers and most other programs load; gguf: one file for llama.cpp; "
        "peft: the adapters alone (default: %(default)s)",
    )
    add("--step", metavar="N", type=int, help=STEP_HELP)
    add(
        "--dtype",
        choices=list(DTYPES),
        help="type of the tensors (default: that of the weights that the run began with, else that "
        "of its parameters)",
    )
    add_shard_size(parser)
    add(
        "--quant",
        choices=list(QUANTS),
        help="how a GGUF file stores numbers (default: f32, bf16 or f16, as of --dtype)",
    )
    add(
        "--pre-tokenizer",
        metavar="NAME",
        help="llama.cpp's name of how the tokenizer finds words, if it can't be found out",
    )
    add(
        "--chat-template",
        metavar="FILE",
        type=Path,
        help="chat template to copy, or chatml (default: the one beside the tokenizer of RUN's "
        "data, if any)",
    )
    args = parser.parse_args(argv)
    check_step(args.step)
    for name, formats in _formats_of_options().items():
        if getattr(args, name) is not None and args.format not in formats:
            raise UsageError(
                f"--{name.replace('_', '-')}: is of --format {choices(formats)}. Leave it out."
            )
    return args


def _formats_of_options() -> dict[str, list[str]]:
    """The formats that have each option."""
    found: dict[str, list[str]] = {}
    for form, names in _OPTIONS.items():
        for name in names:
            found.setdefault(name, []).append(form)
    return found


def _read_template(path: Path | None) -> bytes | None:
    """A chat template as it is, or that of chatml; UsageError: it can't be read."""
    if path is None:
        return None
    if str(path) == "chatml":
        return CHATML.encode()
    try:
        content = path.expanduser().read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error
        if isinstance(error, OSError):
            reason = error.strerror
        raise UsageError(
            f"--chat-template {path}: can't be read ({reason}). Name a file of text."
        ) from error
    return content


def _describe(out: Path, exported: ExportResult, dtype: str, config: RunConfig) -> list[str]:
    """Return the summary of an export for the user."""
    params = config.precision.params
    loader = "AutoModelForCausalLM"
    if config.model.score:
        loader = "AutoModelForSequenceClassification"
    size = sum(exported.files.values())
    lines = [f"{out}: {', '.join(exported.files)} ({size / 1e6:,.1f} MB)"]
    verified = exported.verified
    if dtype != "float32" and dtype != params:
        lines.append(
            f"read again: its parameters are the run's, rounded to {dtype}; its logits differ from "
            f"the run's by up to {verified.difference:.2g}, where the largest is "
            f"{verified.largest:.3g}."
        )
    else:
        lines.append("read again: its parameters and logits are the run's, bit for bit.")
    lines += exported.notes
    what = "load its weights"
    if SETTINGS in exported.files:
        what = "load it"
    lines.append(f'{what}: {loader}.from_pretrained("{out}")')
    return lines


def main(argv: Sequence[str], prog: str = "maxtrain export") -> int:
    """Runs the command; the exit code."""

    def job() -> None:
        args = _parse(argv, prog)
        require_no_url(args.out, "OUT")
        out = args.out.expanduser()
        args.run = str(readable(args.run))
        config = read_run_config(args.run)
        if config.model.score and args.format != "hf":
            raise UsageError(
                f"--format {args.format}: has no place for the score of a reward model, which "
                f"{args.run} is. Leave it out."
            )
        if args.format == "gguf":
            require_suffix(out)
            require_no_file(out)
            library()
        else:
            require_free(out)
        template = _read_template(args.chat_template)
        start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
        # Named, so that a training that saves meanwhile changes nothing.
        step = step_of(args.run, args.step)
        model, tokenizer = load_run(args.run, step)
        if args.format == "peft":
            _export_peft(args, model, tokenizer, config, template)
            return
        if config.model.lora.rank is not None:
            print(f"{args.run}: its adapters are taken into the weights")
            model = merged(model)
        if args.format == "gguf":
            _export_gguf(args, model, tokenizer, config)
            return
        dtype = args.dtype or _default_dtype(args.run, config)
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
        which = "newest checkpoint"
        if step is not None:
            which = f"step {step:,}"
        if config.optimizer.ema_decay is not None:
            which += ", averaged weights (optimizer.ema_decay)"
        print(f"{args.run}, {which}: {count:,} parameters, written in {dtype}")
        place = tokenizer_place(args.run)
        # With the vocabulary of the data, which the config may leave open.
        with_vocabulary = dataclasses.replace(model.config, lora=config.model.lora)
        config = dataclasses.replace(config, model=with_vocabulary)
        facts = model_card.ExportedModel(config, step, count, dtype)
        card = model_card.model_card(args.run, facts)
        exported = export(
            model,
            tokenizer,
            place,
            out,
            dtype,
            args.max_shard_size or MAX_SHARD_BYTES,
            template,
            card,
            print_on_stderr,
        )
        for line in _describe(out, exported, dtype, config):
            print(line)

    return run_command(job, resumes=False)


def _default_dtype(run: str, config: RunConfig) -> str:
    """The type of exported numbers if nobody asks for one: that of the weights that the run was
    made from, or began with, if they have fewer bits than its parameters."""
    stored = dtype_of_weights(run)
    if config.precision.params == "float32" and stored is not None:
        return stored
    return config.precision.params


def _export_gguf(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, config: RunConfig
) -> None:
    """The job of --format gguf."""
    out = args.out.expanduser()
    quant = args.quant or _QUANT_OF[_default_dtype(args.run, config)]
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    print(f"{args.run}: {count:,} parameters, written as {quant}")
    written = export_gguf(
        model,
        tokenizer,
        tokenizer_place(args.run),
        out,
        quant,
        config.run_name,
        str(args.chat_template or ""),
        args.pre_tokenizer,
    )
    print(f"{out}: {written.size / 1e6:,.1f} MB")
    print(
        "read again: its keys are what was written, and its parameters and logits are those of the "
        f"run rounded to {quant}, bit for bit."
    )
    if written.difference:
        print(
            f"rounding: tensors change by up to {written.error:.2%} of their size, and logits by "
            f"up to {written.difference:.2g}, where the largest is {written.largest:.3g}."
        )
    for note in written.notes:
        print(note)
    print(f"run it: llama-cli -m {shlex.quote(str(out))}")


def _export_peft(
    args: argparse.Namespace,
    model: Decoder,
    tokenizer: Tokenizer,
    config: RunConfig,
    template: bytes | None,
) -> None:
    """The job of --format peft."""
    out = args.out.expanduser()
    began_with = starting_weights(Path(args.run), config)
    base = began_with.init_from
    if model.config.lora.rank is not None:
        require_base_as_it_was(model, config.train, began_with.init_partial)
    beside = TokenizerFiles(tokenizer, tokenizer_place(args.run), template)
    files, notes = export_adapters(model, out, base, beside)
    size = sum(files.values())
    print(f"{out}: {', '.join(files)} ({size / 1e6:,.1f} MB)")
    print("read again: its adapters are the run's, bit for bit.")
    for note in notes:
        print(note)
    if base is None:
        print("The run began with random weights, so that the files name none that they are for.")
    else:
        form = config.model.lora.base
        if form != "full":
            print(
                f"They were trained on the weights of {base} in {form} (model.lora.base). On these "
                "weights as they are, the model is a little another; --format hf writes the "
                "weights that they were trained on, with the adapters in them."
            )
        loaded = "AutoModelForCausalLM.from_pretrained(...)"
        print(f'load it: PeftModel.from_pretrained({loaded}, "{out}")')
