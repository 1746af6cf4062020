"""Sums of small numbers: prompts, the text that a model is taught before, and a reward."""

import json
import random
import re
from pathlib import Path

FORM = re.compile(r"<\d+>\$")
MOST = 5


def score(prompts, completions, completion_ids, **columns):
    """0.1 for an answer that begins well, 0.4 for its form, 1 for the sum."""
    found = []
    for text, answer in zip(completions, columns["answer"]):
        reward = 0.1 * text.startswith("<")
        if FORM.fullmatch(text):
            reward += 0.4 + 1.0 * (text == f"<{answer}>$")
        found.append(reward)
    return found


def even_alike(prompts, completions, completion_ids, **columns):
    """The length of a completion where the sum is odd, and 1 where it is even."""
    found = []
    for ids, answer in zip(completion_ids, columns["answer"]):
        reward = 1.0
        if int(answer) % 2:
            reward = float(len(ids))
        found.append(reward)
    return found


def no_number_for_zero(prompts, completions, completion_ids, **columns):
    """A fault of a reward, where the sum is 0."""
    return ["none" if answer == "0" else 1.0 for answer in columns["answer"]]


def write_prompts(path: Path) -> None:
    """All of them, with the answer as a column."""
    lines = []
    for a in range(MOST):
        for b in range(MOST):
            lines.append(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    path.write_text("".join(lines))


def write_texts(path: Path, count: int) -> None:
    """Prompts with random answers, half of them in another form."""
    rng = random.Random(0)
    lines = []
    for _ in range(count):
        answer = f"<{rng.randrange(2 * MOST - 1)}>$"
        if rng.random() < 0.5:
            broken = list(answer)
            del broken[rng.randrange(len(broken))]
            answer = "".join(broken)
        text = f"{rng.randrange(MOST)}+{rng.randrange(MOST)}={answer}"
        lines.append(json.dumps({"text": text}) + "\n")
    path.write_text("".join(lines))
