"""What a person sees while a run goes on: a live line in a terminal, plain lines in a file or a
pipe, or nothing.

Only prints. The numbers are those of a record of metrics (see `metrics.py`); one that is not in the
record is left out.
"""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from maxtrain.observe import human

_LEFT_STANDING = 100  # records of a run, at most, above the live line
_LONGEST_BAR, _SHORTEST_BAR = 30, 8


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
        self._console = console or Console(
            force_terminal=True if mode == "rich" else None, highlight=False
        )
        self._units = units or {}
        self._mode = ("rich" if self._console.is_terminal else "plain") if mode == "auto" else mode
        self._total, self._step = total_steps, 0
        self._record: Mapping[str, Any] = {}
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
        """Say that so many steps are done; the live line goes on showing the last record of metrics
        that it got."""
        self._step, self._phase = step, None
        if record is not None:
            self._record = record
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
        bits_per_byte and tokens; and quantities with their units."""
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
        left = self._total - self._step
        columns = {
            "loss": lambda v: f"loss {v:7.4f}",
            "tokens_per_second": lambda v: f"{human.count(v):>5} tok/s",
            "mfu": lambda v: f"MFU {v:5.1%}",
            "device_peak_bytes": lambda v: f"{human.count(v):>5}B peak",
            "step_seconds": lambda v: f"{human.duration(left * v):>5} left" if left > 0 else "",
        }
        words = [
            form(self._record[name])
            for name, form in columns.items()
            if self._record.get(name) is not None
        ]
        return "  ".join([self._steps(self._step), *filter(None, words)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The live line: a bar if the terminal is wide enough, then the numbers or what takes its
        time now."""
        words, width = self._words(), options.max_width - 1
        if self._phase:
            words = f"{self._steps(self._step)}  {self._phase[0]}  {human.duration(time.monotonic() - self._phase[1])}"
        bar = min(_LONGEST_BAR, width - len(words) - 2)
        if bar >= _SHORTEST_BAR:
            done = bar * self._step // self._total if self._total else bar
            yield Text.assemble(("━" * done, "cyan"), ("─" * (bar - done), "dim"), "  ", end="")
            width -= bar + 2
        text = Text(words, no_wrap=True, end="")
        text.highlight_words(("step", "loss", "tok/s", "MFU", "left"), "dim")
        text.truncate(width, overflow="ellipsis")
        yield text
