"""`maxtrain merge RECIPE OUT`: one model of several, by a recipe in mergekit's YAML.

Models are Hugging Face directories, runs (RUN) or their checkpoints (RUN@STEP), with the same
tensors and the same tokenizer. Tensor by tensor is read, merged in float32, rounded once and
written; then all are read again, and only then does the directory get the name OUT. merge.json in
it says what it was made of.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from data_pipeline.base.errors import DataError, StorageError, run_command
from data_pipeline.base.terminal import unescaped
from data_pipeline.shards import write_atomic
from maxtrain import __version__
from maxtrain.commands.export.command import MAX_SHARD_BYTES, add_shard_size
from maxtrain.commands.merge.recipe import MergeRecipe, num_layers, read_recipe
from maxtrain.commands.merge.sources import SourceModel, open_model
from maxtrain.commands.merge.tensors import merged
from maxtrain.models.hf_mapping import LazyArray, Part
from maxtrain.storage.publish import publishing, require_free
from maxtrain.storage.reading import require_no_url
from maxtrain.trainer.saved_run import print_on_stderr
from maxtrain.weights.hf_export import write_tensors
from maxtrain.weights.memory_order import in_c_order

PROVENANCE = "merge.json"
_MOST_NAMED = 20
# Keys of config.json that do not change what a model computes.
_FREE = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


class MergeResult(NamedTuple):
    """Result of a merge."""

    num_tensors: int
    num_parameters: int
    dtype: str
    # Notes for the user.
    notes: list[str]


def merge(
    recipe: MergeRecipe, out: Path, max_shard_bytes: int = 5 * 10**9, progress: bool = False
) -> MergeResult:
    """Merge models as a recipe says, into a new directory.

    Args:
        recipe: how.
        out: the directory to be made; an empty one may be there.
        max_shard_bytes: of the tensors in one file.
        progress: whether a line on stderr says how far it has come.

    Raises:
        UserError: models do not fit together, or the recipe gives no number for one of them, or is
            for a part of their layers; `out` is then as it was.
    """
    out = Path(os.path.abspath(out))
    require_free(out)
    with contextlib.ExitStack() as held:
        models = {place: open_model(place, held) for place in recipe.places()}
        notes = require_alike(recipe, models)
        first = models[recipe.places()[0]]
        recipe.require_all_layers(num_layers(list(first.tensors)))
        dtypes = dict(first.dtypes)
        if recipe.dtype is not None:
            dtypes = dict.fromkeys(dtypes, recipe.dtype)
        read = {place: hashlib.sha256() for place in models}
        lazy = dict(_lazily(recipe, models, read, progress))
        digests = {}

        def note(name: str, content: memoryview) -> None:
            digests[name] = hashlib.sha256(content).hexdigest()

        with publishing(out, "merge") as directory:
            write_tensors(directory, lazy, dtypes, max_shard_bytes, print_on_stderr, note)
            models[recipe.tokenizer or first.place].write_tokenizer(directory)
            first.write_config(directory, _usual(dtypes))
            _verify(directory, digests)
            hashes = {place: digest.hexdigest() for place, digest in read.items()}
            stored_as = {
                place: model.stored_as for place, model in models.items() if model.stored_as
            }
            write_atomic(directory / PROVENANCE, _provenance(recipe, hashes, stored_as))
    count = sum(int(np.prod(array.shape)) for array in lazy.values())
    return MergeResult(len(lazy), count, _usual(dtypes), notes)


def require_alike(recipe: MergeRecipe, models: Mapping[str, SourceModel]) -> list[str]:
    """Return the differences of the configs of models, as lines.

    Raises:
        DataError: with a table of tensors that not all models have, or not in the same shape; or
            their tokenizers differ.
    """
    first, *others = models.values()
    rows = []
    for other in others:
        for name in sorted(first.tensors.keys() | other.tensors.keys()):
            shapes = []
            for model in (first, other):
                shape = "missing"
                if name in model.tensors:
                    shape = str(list(model.tensors[name].shape))
                shapes.append(shape)
            if shapes[0] != shapes[1]:
                rows.append(
                    f"    {name}: {shapes[0]} in {first.place}, {shapes[1]} in {other.place}"
                )
    if rows:
        shown = rows[:_MOST_NAMED]
        if len(rows) > len(shown):
            shown.append(f"    ... and {len(rows) - len(shown)} more")
        raise DataError(
            "the models can't be merged, since their tensors differ:\n"
            + "\n".join(shown)
            + "\nMerge models that were trained from the same one, with the same vocabulary."
        )
    hashes = {model.tokenizer for model in models.values()}
    if len(hashes) > 1 and recipe.tokenizer is None:
        listed = ", ".join(
            f"{model.place}: {str(model.tokenizer)[:12]}" for model in models.values()
        )
        raise DataError(
            f"the models' tokenizers differ ({listed}), so a token would mean several things. "
            "Merge models with one tokenizer, or set tokenizer_source to the one to take."
        )
    notes = []
    for other in others:
        for key in sorted((first.config.keys() & other.config.keys()) - _FREE):
            if first.config[key] != other.config[key]:
                notes.append(
                    f"config.json: {key} is {first.config[key]} in {first.place}, which is taken, "
                    f"and {other.config[key]} in {other.place}"
                )
    return notes


def _lazily(
    recipe: MergeRecipe, models: Mapping[str, SourceModel], read: Mapping[str, Any], progress: bool
) -> Iterator[tuple[str, LazyArray]]:
    """Each tensor's name, and the tensor, which is merged when it is read."""
    first = models[recipe.places()[0]]
    names = list(first.tensors)
    layers = num_layers(names)
    for number, name in enumerate(names, 1):
        progress_line = ""
        if progress:
            progress_line = f"\r{number:,} of {len(names):,} tensors"
        make = functools.partial(_merge_one, recipe, models, read, name, layers, progress_line)
        yield name, LazyArray(first.tensors[name].shape, make)


def _merge_one(
    recipe: MergeRecipe,
    models: Mapping[str, SourceModel],
    read: Mapping[str, Any],
    name: str,
    layers: int,
    progress: str,
    part: Part,
) -> np.ndarray:
    del part
    arrays = {}
    for place, model in models.items():
        array = model.tensors[name].whole()
        array = in_c_order(array, array.dtype)
        read[place].update(name.encode())
        read[place].update(array.reshape(-1).view(np.uint8).data)
        arrays[place] = array.astype(np.float32)
        if not np.isfinite(arrays[place]).all():
            raise DataError(
                f"{name} of {place} holds NaN or infinity. Leave this model out, or get its files "
                "again."
            )
    result = merged(recipe, name, arrays, layers)
    if progress:
        print(progress, end="", file=unescaped(sys.stderr), flush=True)
    return result


def _usual(dtypes: Mapping[str, str]) -> str:
    """The type of most tensors."""
    kinds = list(dtypes.values())
    return max(sorted(set(kinds)), key=kinds.count)


def _verify(directory: Path, digests: Mapping[str, str]) -> None:
    """StorageError: what is read back is not what was written."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118, not a mapping
                array = np.ascontiguousarray(file.get_tensor(name)).reshape(-1)
                found[name] = hashlib.sha256(array.view(np.uint8).data).hexdigest()
    wrong = [name for name, digest in digests.items() if found.get(name) != digest]
    if wrong:
        raise StorageError(
            f"{len(wrong)} tensors ({', '.join(wrong[:3])}) are read back otherwise than they were "
            "written. Nothing was merged. Look at the disk, then run the same command again."
        )


def _provenance(
    recipe: MergeRecipe, hashes: Mapping[str, str], stored_as: Mapping[str, str]
) -> bytes:
    """Return what the model was made of; hashes are of plain tensors."""
    values = {
        "maxtrain": __version__,
        "recipe": recipe.text,
        "seed": recipe.seed,
        "stored_as": dict(stored_as),
        "tensors_sha256": dict(hashes),
    }
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="YAML file in the form of mergekit")
    add("out", metavar="OUT", type=Path, help="directory to be made")
    add("--seed", type=int, metavar="N", help="of what is random (default: the recipe's, or 0)")
    add_shard_size(parser)
    args = parser.parse_args(argv)
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed {args.seed} must be at least 0")
    return args


def main(argv: Sequence[str], prog: str = "maxtrain merge") -> int:
    """Runs the command; the exit code."""

    def job() -> None:
        args = _parse(argv, prog)
        recipe = read_recipe(args.recipe)
        if args.seed is not None:
            recipe = dataclasses.replace(recipe, seed=args.seed)
        require_no_url(args.out, "OUT")
        out = args.out.expanduser()
        is_terminal = sys.stderr.isatty()
        made = merge(recipe, out, args.max_shard_size or MAX_SHARD_BYTES, progress=is_terminal)
        if is_terminal:
            print(file=sys.stderr)
        for note in made.notes:
            print(note)
        print(
            f"{out}: {made.num_parameters:,} parameters in {made.num_tensors:,} tensors of "
            f"{made.dtype}, by {recipe.method} of {', '.join(recipe.places())}; read again: as "
            "written"
        )

    return run_command(job, resumes=False)
