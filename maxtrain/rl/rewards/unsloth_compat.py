"""The five rewards of Unsloth's well-known notebook for GRPO on GSM8K, number for number, so that
runs can be compared with it.

For training use gsm8k.py, which fixes these faults:

* `.` matches no newline: both formats give 0 to any reasoning or answer of several lines.
* The strict format also requires a newline at the very end.
* Numbers are compared as texts: "1,000" is not "1000", "72.0" not "72", and "-5" is no integer.
* A completion without tags is itself the answer, which may be correct.
* Text after the answer costs 0.001 a character twice; if no newline follows `</answer>`, the whole
completion counts as such text; and there is no lower bound.

Source: Unsloth's notebooks of GRPO, after W. Brown's gist grpo_demo.py (2025).
"""

import re

from maxtrain.rl.rewards.contract import column_of

_STRICT = re.compile(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$")
_SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>")
_COLUMN = "answer"


def correctness_reward_func(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 2.0 if the answer is the text after `####` in the column `answer`, else 0.0."""
    column = column_of(columns, _COLUMN, "unsloth_compat.correctness_reward_func")
    return [2.0 * (_answer(text) == _gold(gold)) for text, gold in zip(completions, column)]


def int_reward_func(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.5 if the answer has digits only, else 0.0."""
    return [0.5 * _answer(text).isdigit() for text in completions]


def strict_format_reward_func(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.5 for the four tags on lines of their own, with one line in each pair, else 0.0."""
    return [0.5 * bool(_STRICT.match(text)) for text in completions]


def soft_format_reward_func(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.5 for a beginning with the four tags, with at most one line in each pair, else
    0.0."""
    return [0.5 * bool(_SOFT.match(text)) for text in completions]


def xmlcount_reward_func(
    prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
) -> list[float | None]:
    """Reward 0.125 for each tag with its newlines that occurs once, minus 0.001 for each character
    that is taken to follow the answer, twice."""
    return [_count_xml(text) for text in completions]


def _answer(text: str) -> str:
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def _gold(answer: str) -> str:
    """Return the text after `####`, as the notebook does when it reads the dataset."""
    if "####" not in answer:
        return answer
    return answer.split("####")[1].strip()


def _count_xml(text: str) -> float:
    count = 0.0
    if text.count("<reasoning>\n") == 1:
        count += 0.125
    if text.count("\n</reasoning>\n") == 1:
        count += 0.125
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        count -= len(text.split("\n</answer>\n")[-1]) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        count -= (len(text.split("\n</answer>")[-1]) - 1) * 0.001
    return count
