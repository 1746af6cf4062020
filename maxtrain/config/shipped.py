"""Config files by name, and the file that `config=` means."""

import difflib
import os
from pathlib import Path

from data_pipeline.base.errors import ConfigError
from maxtrain.config.files import SUFFIXES
from maxtrain.config.words import show

# How README.md and docs/ make the data of the configs that come with the package, by the path that
# they name.
PREPARED_BY = {
    "data/stdlib/train": (
        "python -m data_pipeline.prepare data/stdlib --python-stdlib --tokenizer bpe:4096 "
        "--holdout 0.05"
    ),
    "data/shakespeare_char/train": (
        "python -m data_pipeline.prepare data/shakespeare_char --text input.txt --tokenizer chars "
        "--holdout 0.1 --holdout-by tail"
    ),
    "data/gsm8k/train": (
        "maxtrain prepare data/gsm8k --chat train.jsonl --map gsm8k "
        "--system 'Give <reasoning> and <answer>.' --tokenizer pretrained --holdout 0.1"
    ),
    "data/gsm8k-prompts/train": (
        "maxtrain prepare data/gsm8k-prompts --prompts train.jsonl --map gsm8k "
        "--system 'Give <reasoning> and <answer>.' --tokenizer pretrained --holdout 0.1"
    ),
    "data/worked/train": (
        "python -m maxtrain.examples.word_problems problems && "
        "maxtrain prepare data/worked --chat problems/worked.jsonl --map gsm8k "
        "--system 'Give <reasoning> and <answer>.' --tokenizer problems/tokenizer --holdout 0.1"
    ),
    "data/results/train": (
        "python -m maxtrain.examples.word_problems problems && "
        "maxtrain prepare data/results --prompts problems/results.jsonl "
        "--system 'Give <reasoning> and <answer>.' --tokenizer problems/tokenizer --holdout 0.1"
    ),
}


def shipped_configs() -> dict[str, Path]:
    """Config files by name: those that come with the package (installed, or in its repository),
    then those of ./configs."""
    package = Path(__file__).parents[1]
    folder = package / "configs"
    if not folder.is_dir():
        folder = package.parent / "configs"
    found = {}
    for place in (folder, Path("configs")):
        for path in sorted(place.glob("*")):
            if path.suffix in SUFFIXES:
                found[path.stem] = path
    return found


def available() -> str:
    """The configs that there are, for a message."""
    names = ", ".join(sorted(shipped_configs())) or "none"
    return f"Available: {names}; or the path of a .py or .yaml file"


def find_file(reference: str) -> Path:
    """The config file of `config=reference`; raises ConfigError."""
    shipped = shipped_configs()
    path = shipped.get(reference)
    if path is None:
        path = Path(os.path.expanduser(reference))
    if path.suffix in SUFFIXES and os.path.isfile(path):
        return path
    fix = available()
    close = difflib.get_close_matches(reference, shipped, 1)
    if close:
        fix = f"Did you mean config={close[0]}? {fix}"
    raise ConfigError(
        f"config={show(reference)} is neither a known name nor a .py or .yaml file. {fix}."
    )
