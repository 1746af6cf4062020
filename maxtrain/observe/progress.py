"""Progress display of a run: a live line in a terminal, plain lines in a file or a pipe, or
nothing.

Only prints. The numbers are those of a record of metrics (see `metrics.py`); one that is not in the
record is left out.
"""

import collections
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from maxtrain.observe import human

_LEFT_STANDING = 100  # records of a run, at most, above the live line
_LONGEST_BAR, _SHORTEST_BAR = 30, 8
# What is no number in the live line.
_WORDS = ("step", "loss", "tok/s", "MFU", "left", "reward", "accuracy", "length", "KL")
# Where the time that is left stands in the line of a record.
_LEFT = "left"
_Forms = Mapping[str, Callable[[float], str]]


def _tokens_per_second(value: float) -> str:
    return f"({human.count(value)} tok/s)"


# Numbers of a record of training and how they are written, in the order of the line.
_OF_TEXT: _Forms = {
    "loss": "loss {:7.4f}".format,
    "tokens_per_second": lambda value: f"{human.count(value):>5} tok/s",
    "mfu": "MFU {:5.1%}".format,
    "device_peak_bytes": lambda value: f"{human.count(value):>5}B peak",
    _LEFT: lambda seconds: f"{human.duration(seconds):>5} left",
}
# Of steps that learn from rollouts. What is last is cut where the terminal is narrow.
_OF_ROLLOUTS: _Forms = {
    "reward": "reward {:7.4f}".format,
    "accuracy": "accuracy {:6.1%}".format,
    "completion_length": "length {:6.1f}".format,
    "kl": "KL {:7.4f}".format,
    _LEFT: _OF_TEXT[_LEFT],
    "sampling_seconds": "sampling {:5.1f} s".format,
    "sampled_tokens_per_second": _tokens_per_second,
    "reward_seconds": "rewards {:5.1f} s".format,
    "scoring_seconds": "scoring {:5.1f} s".format,
    "step_seconds": "training {:5.1f} s".format,
    "tokens_per_second": _tokens_per_second,
}
# Of an evaluation of prompts.
_OF_ANSWERS: _Forms = {
    "accuracy": "accuracy {:.1%}".format,
    "reward": "reward {:.4f}".format,
    "completion_length": "length {:.1f}".format,
    "truncated": "truncated {:.1%}".format,
    "prompts": "({:,} prompts)".format,
}


class Progress:
    """Shows a run from `with Progress(...) as progress:` to the end of the block. Make it on
    process 0 only.

    Mode "rich" draws a live line, and leaves some 100 records of a run standing above it; "plain"
    prints a line for each record and flushes it; "off" prints nothing; "auto" is rich in a terminal
    and plain elsewhere. `units` are those of the numbers of an evaluation that are shown beside
    the loss, by their names.
    """

    def __init__(
        self,
        mode: Literal["auto", "rich", "plain", "off"],
        total_steps: int,
        console: Console | None = None,
        units: Mapping[str, str] | None = None,
    ):
        self._console = console or SafeConsole(force_terminal=True if mode == "rich" else None)
        self._units = units or {}
        self._mode = ("rich" if self._console.is_terminal else "plain") if mode == "auto" else mode
        self._total, self._step = total_steps, 0
        self._record: Mapping[str, Any] = {}
        # Seconds of a step's rollout by the last records: not each step begins with one.
        self._rollouts = collections.deque[float](maxlen=16)
        self._left = -math.inf  # the step of the last record that was left standing
        self._phase: tuple[str, float] | None = None
        self._live = (
            Live(self, console=self._console, refresh_per_second=5)
            if self._mode == "rich"
            else None
        )

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = None
        if self._live:
            self._live.stop()

    def update(self, step: int, record: Mapping[str, Any] | None = None) -> None:
        """Show that `step` steps are done; the live line keeps showing its last record of
        metrics.
        """
        self._step, self._phase = step, None
        if record is not None:
            self._record = record
            if "rollout_seconds" in record:
                self._rollouts.append(record["rollout_seconds"])
            if self._mode == "plain" or step - self._left >= self._total / _LEFT_STANDING:
                self._left = step
                self.message(self._words())

    def phase(self, text: str) -> None:
        """Say what takes its time now, until the next update or phase; an empty text ends it."""
        self._phase = (text, time.monotonic()) if text else None
        if text and self._mode == "plain":
            self.message(text)
        if self._live:
            self._live.refresh()

    def message(self, text: str, style: str = "") -> None:
        """Leave lines without markup standing above the live one; `style` is a rich style such as
        "green"."""
        if self._mode != "off":
            self._console.print(Text(text, style=style), soft_wrap=True)  # flushes

    def evaluated(self, step: int, name: str, values: Mapping[str, Any]) -> None:
        """Leave a line with the result of an evaluation: of these what is known, nll, perplexity,
        bits_per_byte and tokens, and quantities with their units; of prompts accuracy, reward and
        length."""
        if "prompts" in values:
            self._answered(step, name, values)
            return
        words = [f"{self._steps(step)}  eval {name}:"]
        if "nll" in values:
            words = [f"{words[0]} nll {values['nll']:.4f}"]
        words += [f"perplexity {values['perplexity']:.4g}"] if "perplexity" in values else []
        words += (
            [f"{values['bits_per_byte']:.4f} bits/byte"]
            if values.get("bits_per_byte") is not None
            else []
        )
        for quantity, unit in self._units.items():
            if quantity in values:
                words.append(f"{quantity} {values[quantity]:.4f} {unit}")
        words += [f"({human.count(values['tokens'])} tokens)"] if "tokens" in values else []
        self.message("  ".join(words), style="green")

    def _answered(self, step: int, name: str, values: Mapping[str, Any]) -> None:
        """The result of an evaluation of prompts."""
        words = "  ".join(_written(values, _OF_ANSWERS))
        self.message(f"{self._steps(step)}  eval {name}: {words}", style="green")

    def sample(self, step: int, prompt: str, completion: str) -> None:
        """Leave what the model makes of a prompt at this step."""
        if self._mode != "off":
            head = f"{self._steps(step)}  sample: "
            self._console.print(
                Text.assemble((head, "dim"), (prompt, "dim"), (completion, "bold")), soft_wrap=True
            )

    def _steps(self, step: int) -> str:
        total = f"{self._total:,}"
        return f"step {step:>{len(total)},}/{total}"

    def _words(self) -> str:
        """The last record in columns of fixed width."""
        forms = _OF_TEXT
        if "completion_length" in self._record:
            forms = _OF_ROLLOUTS
        values = dict(self._record)
        left = self._total - self._step
        seconds = values.get("step_seconds")
        if seconds is not None and left > 0:
            if self._rollouts:
                seconds += sum(self._rollouts) / len(self._rollouts)
            values[_LEFT] = left * seconds
        return "  ".join([self._steps(self._step), *_written(values, forms)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The live line: a bar if the terminal is wide enough, then the numbers or what takes its
        time now."""
        words, width = self._words(), options.max_width - 1
        if self._phase:
            name, began = self._phase
            duration = human.duration(time.monotonic() - began)
            words = f"{self._steps(self._step)}  {name}  {duration}"
        bar = min(_LONGEST_BAR, width - len(words) - 2)
        if bar >= _SHORTEST_BAR:
            done = bar * self._step // self._total if self._total else bar
            yield Text.assemble(("━" * done, "cyan"), ("─" * (bar - done), "dim"), "  ", end="")
            width -= bar + 2
        text = Text(words, no_wrap=True, end="")
        text.highlight_words(_WORDS, "dim")
        text.truncate(width, overflow="ellipsis")
        yield text


def _written(values: Mapping[str, Any], forms: _Forms) -> list[str]:
    """Format the values that are present, in the order of their forms."""
    return [form(values[name]) for name, form in forms.items() if values.get(name) is not None]
