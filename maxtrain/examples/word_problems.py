"""Word problems of arithmetic, and a tokenizer for them.

    python -m maxtrain.examples.word_problems FOLDER

writes into FOLDER

* worked.jsonl: questions with worked answers, in the columns of GSM8K; * results.jsonl: other
questions, each with only its result and the kind of problem; * tokenizer/: a Hugging Face
directory, with a chat template. Numbers are split into digits.

No question occurs twice, in one file or in both. The same command writes the same bytes.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.chat.chat import CHATML

NUM_WORKED = 1500
NUM_RESULTS = 5000
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "beads", "books", "cards", "clips", "coins", "eggs", "pens", "shells", "stones")
SEED = 0
# Vocabulary size of the tokenizer, including 256 bytes and the special tokens.
_ENTRIES = 512
_SPECIAL = ("<|im_start|>", "<|im_end|>")
# Qwen's rule that splits text into words; each digit is a word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Problem(NamedTuple):
    """A question, the steps to its answer, and the result."""

    question: str
    steps: tuple[str, ...]
    result: int

    def worked(self) -> dict[str, str]:
        """Return the problem in the columns of GSM8K."""
        steps = "\n".join(self.steps)
        return {"question": self.question, "answer": f"{steps}\n#### {self.result}"}


def sums(rng: random.Random) -> Problem:
    name, things = _who(rng)
    has = rng.randint(2, 12)
    more = rng.randint(2, 9)
    step, result = _plus(has, more)
    question = f"{name} has {has} {things} and buys {more} more. How many {things} has {name} now?"
    return Problem(question, (f"{name} has {step} {things}.",), result)


def differences(rng: random.Random) -> Problem:
    name, things = _who(rng)
    has = rng.randint(5, 20)
    given = rng.randint(2, has - 2)
    step, result = _minus(has, given)
    question = f"{name} has {has} {things} and gives {given} away. How many {things} are left?"
    return Problem(question, (f"{step} {things} are left.",), result)


def products(rng: random.Random) -> Problem:
    name, things = _who(rng)
    boxes = rng.randint(2, 6)
    each = rng.randint(2, 8)
    step, result = _times(boxes, each)
    question = f"{name} buys {boxes} boxes with {each} {things} each. How many {things} is that?"
    return Problem(question, (f"That is {step} {things}.",), result)


def shares(rng: random.Random) -> Problem:
    name, things = _who(rng)
    friends = rng.randint(2, 6)
    each = rng.randint(2, 8)
    has = friends * each
    step = _calculation(has, "/", friends, each)
    question = (
        f"{name} shares {has} {things} equally among {friends} friends. "
        f"How many {things} does each friend get?"
    )
    return Problem(question, (f"Each friend gets {step} {things}.",), each)


def sums_then_differences(rng: random.Random) -> Problem:
    name, things = _who(rng)
    has = rng.randint(2, 12)
    more = rng.randint(2, 9)
    first, together = _plus(has, more)
    given = rng.randint(2, together - 1)
    second, result = _minus(together, given)
    question = (
        f"{name} has {has} {things}, finds {more} more and gives {given} away. "
        f"How many {things} are left?"
    )
    steps = (f"{name} has {first} {things}.", f"{second} {things} are left.")
    return Problem(question, steps, result)


def products_then_sums(rng: random.Random) -> Problem:
    name, things = _who(rng)
    boxes = rng.randint(2, 4)
    each = rng.randint(2, 5)
    more = rng.randint(2, 9)
    first, in_boxes = _times(boxes, each)
    second, result = _plus(in_boxes, more)
    question = (
        f"{name} buys {boxes} boxes with {each} {things} each and finds {more} more. "
        f"How many {things} is that?"
    )
    steps = (f"That is {first} {things}.", f"Then {name} has {second} {things}.")
    return Problem(question, steps, result)


# Problem generators, by the signs of the steps.
KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "a + b": sums,
    "a - b": differences,
    "a x b": products,
    "a / b": shares,
    "a + b - c": sums_then_differences,
    "a x b + c": products_then_sums,
}


def _who(rng: random.Random) -> tuple[str, str]:
    return rng.choice(NAMES), rng.choice(THINGS)


def _plus(a: int, b: int) -> tuple[str, int]:
    return _calculation(a, "+", b, a + b), a + b


def _minus(a: int, b: int) -> tuple[str, int]:
    return _calculation(a, "-", b, a - b), a - b


def _times(a: int, b: int) -> tuple[str, int]:
    return _calculation(a, "*", b, a * b), a * b


def _calculation(a: int, sign: str, b: int, result: int) -> str:
    """Write a calculation in the format of GSM8K, with the marks for its calculator."""
    return f"{a} {sign} {b} = <<{a}{sign}{b}={result}>>{result}"


def problems(count: int, seed: int = SEED) -> list[tuple[str, Problem]]:
    """Return `count` problems with their kinds, each kind equally often; no question occurs
    twice."""
    rng = random.Random(seed)
    names = list(KINDS)
    questions: set[str] = set()
    found: list[tuple[str, Problem]] = []
    while len(found) < count:
        kind = names[len(found) % len(names)]
        problem = KINDS[kind](rng)
        if problem.question not in questions:
            questions.add(problem.question)
            found.append((kind, problem))
    return found


def write(folder: Path, num_worked: int = NUM_WORKED, num_results: int = NUM_RESULTS) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = problems(num_worked + num_results)
    worked = [problem.worked() for _, problem in made[:num_worked]]
    results = []
    for kind, problem in made[num_worked:]:
        results.append({"prompt": problem.question, "answer": str(problem.result), "kind": kind})
    for name, lines in (("worked", worked), ("results", results)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    write_tokenizer(
        folder / "tokenizer", [f"{each['question']}\n{each['answer']}\n" for each in worked]
    )


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Train a byte-level BPE on these texts, with the special tokens of chatml, and write it."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    form = "<reasoning>\n</reasoning>\n<answer>\n</answer>\n"
    roles = f"system\nGive <reasoning> and <answer>.user\nassistant\n{form}"
    trainer = trainers.BpeTrainer(
        vocab_size=_ENTRIES,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([*texts, *[roles] * len(texts)], trainer)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write all files and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m maxtrain.examples.word_problems", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    add = parser.add_argument
    add(
        "--worked",
        type=int,
        default=NUM_WORKED,
        metavar="N",
        help="worked answers (default: %(default)s)",
    )
    add(
        "--results",
        type=int,
        default=NUM_RESULTS,
        metavar="N",
        help="results (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    write(args.folder, args.worked, args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
