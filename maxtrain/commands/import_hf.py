"""`maxtrain import DIR RUN`: the run directory of a model that comes from elsewhere.

RUN is made like those of trainings: a resolved config, whose model is that of DIR's config.json; a
checkpoint of step 0 with digests and a commit record; and the tokenizer, in RUN/tokenizer, so that
`generate`, `evaluate` and `export` need no data. There are weights alone, no moments of an
optimizer: a training begins with them by checkpoint.init_from=RUN.

All is written into a hidden directory beside RUN, read again, and compared: all parameters bit for
bit, and logits on a few tokens. Only then does the directory get the name RUN, so that an import
that is killed leaves nothing that looks finished.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

from data_pipeline.base.errors import ConfigError, StorageError, run_command
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.tokenizer import (
    TOKENIZER_FOLDER,
    Tokenizer,
    carry_imported,
    load_tokenizer,
)
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.run_state import imported_record
from maxtrain.commands.verify import forget_arrays, logits, some_tokens
from maxtrain.config.load import to_yaml
from maxtrain.config.paths import expand_paths
from maxtrain.config.problems import problems_of
from maxtrain.config.schema import (
    CheckpointConfig,
    MeshConfig,
    ModelConfig,
    ObserveConfig,
    PrecisionConfig,
    RunConfig,
)
from maxtrain.models.families.directory import read_config, stored_as
from maxtrain.ops.digest import tree_digests
from maxtrain.parallel.distributed import start
from maxtrain.parallel.mesh import make_mesh
from maxtrain.storage.publish import publishing, require_free
from maxtrain.storage.reading import require_no_url
from maxtrain.train_step.state import abstract_model
from maxtrain.train_step.trainable import join, split_buffers
from maxtrain.trainer.run_dir import RunFolder
from maxtrain.trainer.saved_run import parameter_dtype, print_on_stderr, require_fitting_tokenizer
from maxtrain.weights.hf import load_weights, stored_dtype

# The one source of an imported run's config, which has a tokenizer and no data.
_SOURCE = "imported"


class ImportResult(NamedTuple):
    """Result of an import."""

    num_parameters: int
    config: RunConfig


def import_weights(
    directory: str | Path,
    run: Path,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tell: Callable[[str], object] = lambda table: None,
) -> ImportResult:
    """Make a run directory of a Hugging Face directory, and see that it reads back as what it is.

    Args:
        directory: with config.json, weights and a tokenizer.
        run: the directory to be made; an empty one may be there.
        dtype: "float32" or "bfloat16", of parameters and of the inputs of matrix products.
        tell: gets a table of what was loaded, and of what was not used.

    Raises:
        DataError: something of `directory` is missing, left over, misshapen, not finite or not
            supported.
        UsageError: `run` is there, and is not an empty directory.
        ConfigError: `run` can't be the name of a run.
        StorageError: what was read back is not what was read.
    """
    run = Path(os.path.abspath(run))
    require_free(run, "RUN")
    model = read_config(directory)
    tokenizer = load_tokenizer(directory)
    require_fitting_tokenizer(directory, tokenizer, model)
    config = _config_of(directory, run, model, dtype)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    graphdef, abstract = abstract_model(model, config.precision, mesh)
    with publishing(run, "import", "RUN") as staged:
        variables = load_weights(abstract, directory, model, tell)
        count = sum(leaf.size for leaf in jax.tree.leaves(variables))
        digests = tree_digests(variables)
        _write(staged, config, tokenizer, variables)
        # What the compiler takes for it stays taken, and what saving takes does not.
        tokens = some_tokens(model)
        expected = np.asarray(logits(graphdef, variables, tokens))
        # There may be no room for both.
        forget_arrays(variables)
        del variables
        restored = _read_back(staged, abstract)
        different = [
            name for name, found in tree_digests(restored).items() if found != digests[name]
        ]
        found = np.asarray(logits(graphdef, restored, tokens))
        forget_arrays(restored)
        same_tokenizer = load_tokenizer(staged / TOKENIZER_FOLDER).sha256 == tokenizer.sha256
        if different or found.tobytes() != expected.tobytes() or not same_tokenizer:
            difference = float(np.abs(found - expected).max())
            raise _unlike(run, different, difference, same_tokenizer)
    return ImportResult(count, config)


def _config_of(
    directory: str | Path, run: Path, model: ModelConfig, dtype: Literal["float32", "bfloat16"]
) -> RunConfig:
    """The config of an imported run; ConfigError: there can't be a run of this name."""
    source = SourceConfig(path=str(run / TOKENIZER_FOLDER))
    default = DataConfig()
    data = DataConfig(
        sources={_SOURCE: source}, seq_length=min(default.seq_length, model.max_length)
    )
    weights = os.path.abspath(Path(directory).expanduser())
    config = RunConfig(
        run_name=run.name,
        output_dir=str(run.parent),
        model=model,
        data=data,
        precision=PrecisionConfig(params=dtype, compute=dtype),
        checkpoint=CheckpointConfig(init_from=weights),
    )
    config = expand_paths(config)
    problems = [str(problem) for problem in problems_of(config)]
    if problems:
        raise ConfigError(problems)
    return config


def _write(
    staged: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    variables: nnx.State,
) -> None:
    """All files of the run; what makes it one, config.yaml, comes last."""
    folder = staged / TOKENIZER_FOLDER
    carry_imported(folder, tokenizer)
    identity = RunFolder(staged)
    identity.begin(lambda text: None)
    params, buffers = split_buffers(variables)
    source = config.checkpoint.init_from or ""
    record = imported_record(
        identity.id,
        source,
        to_yaml(config),
        tokenizer.sha256,
        stored_as(source),
        stored_dtype(Path(source)),
    )
    checkpoints = Checkpoints(staged / "checkpoints", CheckpointConfig(asynchronous=False))
    try:
        state = {"params": params, "buffers": buffers}
        checkpoints.require_space(state)
        checkpoints.save(0, state, record)
    except KeyboardInterrupt:
        # Between making a thread and starting it, too: nobody could wait for that one.
        checkpoints.abandon(0.0)
        raise
    finally:
        checkpoints.close()
    identity.write_config(to_yaml(config))


def _read_back(staged: Path, abstract: nnx.State) -> nnx.State:
    """The parameters and buffers of the checkpoint, which is held against its own digests, too."""
    params, buffers = split_buffers(abstract)
    checkpoints = Checkpoints(staged / "checkpoints", CheckpointConfig())
    try:
        restored, _ = checkpoints.restore({"params": params, "buffers": buffers}, 0)
    finally:
        checkpoints.close()
    return join(restored["params"], restored["buffers"])


def _unlike(
    run: Path, different: Sequence[str], difference: float, same_tokenizer: bool
) -> StorageError:
    """The error of an import that does not read back as what it is."""
    what = f"logits differ by up to {difference:.3g}"
    if different:
        what = f"{len(different)} parameters ({', '.join(different[:3])}) differ"
    elif not same_tokenizer:
        what = "the tokenizer is another one"
    return StorageError(
        f"RUN={run}: what is read back is not what was read: {what}. Nothing was imported. Look at "
        "the disk that it is on, then run the same command again."
    )


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="Hugging Face directory: config.json, weights, tokenizer")
    add("run", metavar="RUN", type=Path, help="run directory to be made, such as runs/NAME")
    add(
        "--dtype",
        type=parameter_dtype,
        choices=["float32", "bfloat16"],
        default="float32",
        help="number format of parameters and of products (default: %(default)s, which a training "
        "that begins with them has by default)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str], prog: str = "maxtrain import") -> int:
    """Runs the command; the exit code."""

    def job() -> None:
        args = _parse(argv, prog)
        require_no_url(args.run, "RUN")
        run = args.run.expanduser()
        require_free(run, "RUN")
        start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
        made = import_weights(args.directory, run, args.dtype, print_on_stderr)
        print(
            f"{run}: {made.num_parameters:,} parameters of {made.config.model.family} in "
            f"{args.dtype}, step 0; read again: its parameters and logits are those of "
            f"{args.directory}, in that type, bit for bit."
        )
        print(f"train with it: maxtrain train config=NAME checkpoint.init_from={run}")

    return run_command(job, resumes=False)
