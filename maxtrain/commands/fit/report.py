"""Output of `maxtrain fit`: memory, collectives, times, what limits a step, and what would help."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from maxtrain.commands.fit.estimate import FitEstimate
from maxtrain.config.sections.rules import rule_words
from maxtrain.observe import human
from maxtrain.parallel.memory import size
from maxtrain.parallel.mesh import AXES

_LIMITS = {
    "products": "matrix products",
    "memory": "the bandwidth of memory",
    "network": "the network",
}
# Products of the program beyond those of the model that are worth a word.
_MUCH_MORE = 1.15


def mesh_words(found: FitEstimate) -> str:
    """The axes of the mesh that split something, and the rules that are not the usual ones."""
    mesh = found.config.mesh
    axes = []
    for name in AXES:
        count = getattr(mesh, name)
        if count > 1:
            axes.append(f"{name}={count}")
    words = " ".join(axes) or "one device"
    rules = rule_words(mesh.rules)
    if rules:
        words += f" with rules {rules}"
    return words


def duration(seconds: float) -> str:
    """Format the duration of a step or of a part of it."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:,.1f} ms"
    return f"{1e6 * seconds:,.0f} µs"


def flops(count: float) -> str:
    """FLOPs, in the unit that suits them."""
    for unit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if count >= unit:
            return f"{count / unit:,.3g} {letter}FLOP"
    return f"{count / 1e6:,.3g} MFLOP"


def report(found: FitEstimate) -> RenderableType:
    """All that was found."""
    config = found.config
    head = Text.assemble(
        (config.run_name, "bold"),
        f" on {found.num_devices:,} x {found.device}, mesh {mesh_words(found)}\n",
        f"{found.batch.rows:,} rows x {found.batch.length:,} tokens a step, "
        f"remat={config.model.remat}, accumulation={config.optimizer.micro_batches}, "
        f"compiled in {found.compile_seconds:.1f} s\n{found.attention.line}",
    )
    parts: list[RenderableType] = [head, "", memory_table(found)]
    if found.times is None:
        return Group(*parts)
    if found.on_host:
        parts += ["", host_memory_table(found)]
    if found.lines:
        parts += ["", collective_table(found)]
    parts += ["", times_table(found), "", limits_words(found)]
    for warning in found.warnings:
        parts.append(Text(f"XLA gathers an array whole: {warning}", "yellow"))
    if found.unknown_loops:
        parts.append(
            Text(f"{found.unknown_loops} loops of unknown length are counted once.", "yellow")
        )
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def memory_table(found: FitEstimate) -> Table:
    """Bytes by kind, and of how much."""
    table = _table("memory of each device", "", "needs", "of limit")
    for kind, count in found.memory.items():
        table.add_row(kind, size(count), f"{count / found.limit:.1%}")
    if found.sampling is not None:
        share = f"{found.sampling / found.limit:.1%}"
        table.add_row("state and caches, while sampling", size(found.sampling), share, style="dim")
    verdict = "[yellow]does not fit[/]"
    if found.fits:
        verdict = "[green]fits[/]"
    total = found.total or found.refused
    words = "more than the compiler allows"
    share = ""
    if total is not None:
        words = size(total)
        share = f"{total / found.limit:.1%}"
    table.add_row(
        Text.from_markup(f"[bold]needed[/], of {size(found.limit)}: {verdict}"),
        Text.from_markup(f"[bold]{words}[/]"),
        share,
    )
    return table


def host_memory_table(found: FitEstimate) -> Table:
    """Bytes in the memory of hosts by kind, and how many go to devices and back."""
    table = _table("memory of its host, for each device", "", "needs")
    for kind, count in found.on_host.items():
        table.add_row(kind, size(count))
    total = sum(found.on_host.values())
    table.add_row(Text.from_markup("[bold]needed[/]"), Text.from_markup(f"[bold]{size(total)}[/]"))
    table.add_row("copied in a step, there and back", size(int(found.host_traffic)), style="dim")
    return table


def collective_table(found: FitEstimate) -> Table:
    """Kinds of collectives, over which axes."""
    table = _table("collectives of a step", "", "over", "count", "a device sends", "at least")
    for line in found.lines:
        table.add_row(
            line.kind,
            line.over,
            f"{line.count:,}",
            size(line.num_bytes),
            duration(line.seconds),
        )
    return table


def times_table(found: FitEstimate) -> Table:
    """The roofline."""
    times = found.times
    assert times is not None
    table = _table("a step takes at least (an estimate from data sheets, not measured)", "", "", "")
    products = flops(max(found.flops, found.model_share))
    table.add_row("products", duration(times.products), f"{products} at the peak")
    table.add_row("memory", duration(times.memory), f"{size(found.memory_traffic)} moved")
    sent = sum(line.num_bytes for line in found.lines)
    table.add_row("network", duration(times.network), f"{size(sent)} sent")
    speed = f"{human.count(found.tokens_per_second)} tokens/s a device, {found.utilisation:.0%} MFU"
    table.add_row(
        Text.from_markup("[bold]a step[/], if all overlaps"),
        Text.from_markup(f"[bold]{duration(times.seconds)}[/]"),
        speed,
    )
    table.add_row("if nothing overlaps", duration(times.without_overlap), "")
    of_step = flops(found.model.full * found.tokens)
    table.add_row("the model, a token", flops(found.model.full), f"{of_step} a step")
    return table


def limits_words(found: FitEstimate) -> Text:
    """Return what limits a step, and what would help."""
    times = found.times
    assert times is not None
    head = (f"limited by {_LIMITS[times.limit]}: ", "bold")
    return Text.assemble(head, advice(found))


def advice(found: FitEstimate) -> str:
    """Return which change would make a step faster."""
    times = found.times
    assert times is not None
    if times.limit == "products":
        return _more_than_the_model(found)
    rows = found.batch.rows // found.config.optimizer.micro_batches
    fewer = "a larger data.batch_size"
    if found.config.optimizer.micro_batches > 1:
        fewer = "a lower optimizer.accumulation"
    if times.limit == "memory":
        return (
            f"{rows:,} rows at a time use each weight for few tokens. {fewer.capitalize()}, "
            "if it fits, reads weights and gradients less often."
        )
    line = found.lines[0]
    over = " and ".join(f"mesh.{axis}" for axis in line.axes)
    share = f"{line.kind} over {over} is {line.seconds / times.network:.0%} of it"
    is_sum = line.kind == "all-reduce" and line.axes == ("data",)
    if is_sum and found.config.optimizer.micro_batches > 1 and found.config.optimizer.zero < 2:
        return (
            f"{share}: the gradients of layers are summed once for each micro-batch. "
            f"{fewer.capitalize()}, if it fits, sums them less often; "
            "optimizer.zero=2 sends half of it."
        )
    if set(line.axes) <= {"fsdp", "data"}:
        return f"{share}. {fewer.capitalize()}, if it fits, gives each gathered weight more tokens."
    if "tensor" in line.axes:
        return f"{share}. A lower mesh.tensor sends fewer activations; mesh.fsdp takes its place."
    if "expert" in line.axes:
        return f"{share}. A lower mesh.expert exchanges fewer tokens; mesh.fsdp takes its place."
    return f"{share}. A lower mesh.context sends fewer keys and values."


def _more_than_the_model(found: FitEstimate) -> str:
    ratio = found.flops / found.model_share
    if ratio < _MUCH_MORE:
        return "the step computes little beside the model. More devices make it faster."
    model = found.config.model
    remat = model.remat
    more = f"the step computes {ratio:.2f} times what the model needs"
    if remat != "none":
        cheaper = "dots or none" if remat == "full" else "none"
        return f"{more}. model.remat={cheaper}, if it fits, recomputes less."
    if model.pipeline.schedule == "1f1b":
        return f"{more}. model.pipeline.schedule=gpipe, if it fits, recomputes nothing."
    return f"{more}: the masked half of attention, or work that several devices repeat."


def search_table(fits: Sequence[FitEstimate]) -> Table:
    """Return a table of the choices that fit, fastest first."""
    table = _table(
        "what fits, fastest first (an estimate)",
        "mesh",
        "rows",
        "accumulation",
        "remat",
        "memory",
        "of limit",
        "a step",
        "tokens/s a device",
        "limited by",
    )
    for found in fits:
        assert found.times is not None
        assert found.total is not None
        table.add_row(
            mesh_words(found),
            f"{found.batch.rows:,}",
            f"{found.config.optimizer.micro_batches}",
            found.config.model.remat,
            size(found.total),
            f"{found.total / found.limit:.0%}",
            duration(found.times.seconds),
            human.count(found.tokens_per_second),
            found.times.limit,
        )
    return table
