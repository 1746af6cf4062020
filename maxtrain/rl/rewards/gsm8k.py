"""GSM8K in the format `<reasoning>...</reasoning><answer>...</answer>`: five rewards, with the
weights of the well-known notebook (see unsloth_compat.py) and its faults fixed.

* Formats allow reasoning of several lines.
* A tag counts if it occurs exactly once and in its order.
* White space at the end is free; other text there costs 0.001 a character, once.
* Numbers are compared as numbers: "1,000", "-5", "72.0" and "72 apples".
* Without closed tags there is no answer.
"""

import re

from maxtrain.rl.rewards.answers import extract, tagged
from maxtrain.rl.rewards.contract import column_of
from maxtrain.rl.rewards.numerals import read_number, same_number

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_STRICT = re.compile(r"<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>\s*", re.DOTALL)
_BETWEEN = re.compile(r"</reasoning>\s*<answer>")
_COLUMN = "answer"


def gold_of(answer: str) -> str:
    """Return the text after `####` in an answer of the dataset, or the whole answer if there is no
    `####`."""
    return extract(answer, ("hash", "all")) or ""


def correctness(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 2.0 if the tagged answer is the number of the column `answer`, else 0.0; None if the
    column has no number."""
    rewards = []
    for text, answer in zip(completions, column_of(columns, _COLUMN, "gsm8k.correctness")):
        gold = read_number(gold_of(str(answer)))
        found = read_number(tagged(text) or "")
        if gold is None:
            rewards.append(None)
        elif found is not None and same_number(gold, found):
            rewards.append(2.0)
        else:
            rewards.append(0.0)
    return rewards


def integer(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.5 if the tagged answer is a whole number, else 0.0."""
    rewards: list[float | None] = []
    for text in completions:
        found = read_number(tagged(text) or "")
        is_whole = found is not None and found.value.denominator == 1
        rewards.append(0.5 * is_whole)
    return rewards


def strict_format(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.5 if the completion is the four tags, once each, on lines of their own, else 0.0."""
    return [0.5 * (_once(text) and bool(_STRICT.fullmatch(text))) for text in completions]


def soft_format(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.5 if the completion begins with reasoning and an answer in their tags, else 0.0."""
    return [0.5 * _begins_with_both(text.lstrip()) for text in completions]


def tags(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.125 for each tag that occurs exactly once and after the tags before it, minus 0.001
    for each character of text after `</answer>`; at least 0.0."""
    return [_tags(text) for text in completions]


def _tags(text: str) -> float:
    score = 0.0
    last = -1
    for tag in TAGS:
        place = text.find(tag)
        if text.count(tag) == 1 and place > last:
            score += 0.125
            last = place
    _, closing, rest = text.rpartition("</answer>")
    if closing:
        score -= 0.001 * len(rest.strip())
    return max(0.0, score)


def _begins_with_both(text: str) -> bool:
    """Return whether a text matches `<reasoning>.*</reasoning>\\s*<answer>.*</answer>`, in linear
    time."""
    between = _BETWEEN.search(text)
    if not text.startswith("<reasoning>") or between is None:
        return False
    return "</answer>" in text[between.end() :]


def _once(text: str) -> bool:
    return all(text.count(tag) == 1 for tag in TAGS)
