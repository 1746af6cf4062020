"""`maxtrain plan config=NAME key=value ...`: what a run would read and when, as a table and a timeline; starts no device."""

import itertools
import math
import sys
from pathlib import Path

from maxtrain.config import RunConfig, from_command_line
from maxtrain.models.families.directory import model_of

if __name__ == "__main__":
    CONFIG = from_command_line(sys.argv[1:], "python -m maxtrain.show_plan", model_of)

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_pipeline.errors import run_command
from data_pipeline.plan import Plan
from maxtrain.checkpoint.listing import latest_record, second_of
from maxtrain.inputs import open_data, with_vocabulary
from maxtrain.observe.human import count

_BARS = " ▁▂▃▄▅▆▇█"


def table(plan: Plan) -> Table:
    """A line for each stretch of the run with one mixture and shape of batch: shares, and epochs at its end."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("steps", "tokens", "rows x length", *(f"{name}\nshare, epochs" for name in plan.names)):
        result.add_column(head, justify="right", overflow="fold")
    for first, end in itertools.pairwise(plan.changes()):
        shares, epochs, span = plan.shares_at(first), plan.epochs_at(end), plan.span(first)
        cells = [f"{shares[name]:.1%}  {epochs[name]:5.3g}" if shares[name] else "-" for name in plan.names]
        tokens = count(plan.tokens_at(end) - plan.tokens_at(first))
        result.add_row(f"{first:,} to {end:,}", tokens, f"{span.batch_size:,} x {span.seq_length:,}", *cells)
    return result


def timeline(plan: Plan, width: int) -> str:
    """The share of each source over the steps of the run, as bars in `width` columns; the last line says which steps."""
    label = max(map(len, (*plan.names, "step")))
    first, end = plan.changes()[0], f"{plan.num_steps:,}"
    columns = max(len(end) + 2, width - label - 2)
    shares = [plan.shares_at(first + i * (plan.num_steps - first) // columns) for i in range(columns)]
    lines = [f"{name:>{label}}  {''.join(_BARS[math.ceil(8 * at[name])] for at in shares)}" for name in plan.names]
    return "\n".join([*lines, f"{'step':>{label}}  {first:<{columns - len(end)},}{end}"])


def show(config: RunConfig) -> None:
    """Print the plan of a run: the one that it goes on with, if it has begun. UserError: what can't be planned."""
    console = Console(highlight=False)
    folder = Path(config.output_dir, config.run_name, "checkpoints")
    saved = latest_record(folder, second=second_of(folder, config.checkpoint))
    data, _ = open_data(config, saved)
    with_vocabulary(config, data.vocab_size)
    plan = data.plan
    console.print(Text(data.describe()), soft_wrap=True)
    console.print(table(plan))
    console.print(Text(timeline(plan, min(console.width, 120)), "cyan", no_wrap=True))


def main(config: RunConfig) -> int:
    """Runs the command; the exit code."""
    return run_command(lambda: show(config))


if __name__ == "__main__":
    sys.exit(main(CONFIG))
