"""The console of rich that both packages print tables and styled text with."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from data_pipeline.base.terminal import visible


class SafeConsole(Console):
    """A console on which text is text: it is never read as markup, and what would command the
    terminal is shown escaped. Styles come from `Text` alone."""

    def __init__(self, **options: Any):
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def write_text(self, text: str, style: str = "") -> None:
        """Print text as it is, without a line end: into files and pipes byte for byte, on a
        terminal in a style and with what would command it escaped."""
        if self.is_terminal:
            self.print(Text(visible(text), style), end="", soft_wrap=True)
        else:
            self.file.write(text)
        self.file.flush()

    def render_str(self, text: str, **options: Any) -> Text:
        # Before a table measures its cells.
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
