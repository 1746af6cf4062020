"""Completions of the same prompts over the steps of a run: RUN/samples.jsonl, and how people see
them. No jax.

A line has `step`, `set` (an evaluation set, or the data.sources.NAME that the prompt is of),
`number` of the prompt there, `texts` with `prompt` and `completion`, `reward` and `rewards` by name
(null: none applies), `length` in tokens, and whether it was `truncated`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from maxtrain.observe.metrics import read_metrics

FILE_NAME = "samples.jsonl"
KIND = "sample"
# Characters of a text that the summary of a run shows.
_LONGEST = 160


class CompletionSample(NamedTuple):
    """A completion of a prompt; see above."""

    set: str
    number: int
    prompt: str
    completion: str
    reward: float | None
    rewards: Mapping[str, float | None]
    length: int
    truncated: bool

    def record(self) -> dict[str, Any]:
        """Return the fields of a line beside the step."""
        values = self._asdict()
        # Further down, where no text is taken for a number that JSON lacks.
        values["texts"] = {name: values.pop(name) for name in ("prompt", "completion")}
        return values

    def words(self) -> str:
        """The completion with its reward."""
        return f"{self.completion}  [{self.reward_words()}]"

    def reward_words(self) -> str:
        """The reward, and whether the completion was cut."""
        words = "no reward"
        if self.reward is not None:
            words = f"reward {self.reward:.4g}"
        if self.truncated:
            words += ", truncated"
        return words


class SampleRecord(NamedTuple):
    """A sample and the step after which it was taken."""

    step: int
    sample: CompletionSample


def read_samples(folder: Path) -> list[SampleRecord]:
    """All samples of a run, in their order. DataError: a line is none."""
    found = []
    for record in read_metrics(folder, FILE_NAME):
        values = {name: record[name] for name in CompletionSample._fields if name in record}
        found.append(SampleRecord(record["step"], CompletionSample(**values, **record["texts"])))
    return found


def as_text(prompt: Any) -> str:
    """Return a prompt as text: the text itself, or messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    lines = []
    for message in prompt:
        content = message.get("content")
        if not isinstance(content, str):
            content = json.dumps(content, ensure_ascii=False)
        lines.append(f"{message.get('role')}: {content}")
    return "\n".join(lines) + "\n"


def as_markdown(samples: Sequence[CompletionSample]) -> str:
    """Samples of a step as a table, for trackers that show text."""
    lines = ["| prompt | completion | reward | tokens |", "|---|---|---|---|"]
    for sample in samples:
        cells = (sample.prompt, sample.completion, sample.reward_words(), str(sample.length))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def first_and_last(taken: Sequence[SampleRecord]) -> RenderableType | None:
    """Return the first and the last completion of each prompt, as the end of a run shows them; None
    if there are none.
    """
    ends: dict[tuple[str, int], list[SampleRecord]] = {}
    for each in taken:
        ends.setdefault((each.sample.set, each.sample.number), []).append(each)
    if not ends:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("prompt", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("completion", overflow="fold")
    table.add_column("reward", justify="right")
    for of_prompt in ends.values():
        shown = [of_prompt[0]]
        if of_prompt[-1].step != of_prompt[0].step:
            shown.append(of_prompt[-1])
        prompt = shortened(of_prompt[0].sample.prompt)
        for step, sample in shown:
            reward = "-"
            if sample.reward is not None:
                reward = f"{sample.reward:.4g}"
            table.add_row(Text(prompt), f"{step:,}", Text(shortened(sample.completion)), reward)
            prompt = ""
    return table


def shortened(text: str) -> str:
    """A text for a line: newlines are signs, and of a long one there is the beginning and the
    end."""
    text = text.replace("\n", "⏎")
    if len(text) <= _LONGEST:
        return text
    half = (_LONGEST - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for HTML."""
    for sign, word in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(sign, word)
    return text
