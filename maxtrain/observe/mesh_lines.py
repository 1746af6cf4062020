"""Launch messages about the mesh: its axes, what they split, and what a device holds."""

from collections.abc import Mapping

from maxtrain.parallel.memory import size

_SPLIT = {
    "data": "rows; each part has the whole model",
    "stage": "layers, through which rows go in micro-batches",
    "fsdp": "rows, and parameters, which are gathered layer by layer",
    "context": "the tokens of each row",
    "expert": "rows, and experts, which tokens are sent to",
    "tensor": "heads, hidden units and vocabulary",
}


def mesh_lines(
    shape: Mapping[str, int], slow: Mapping[str, int], held: Mapping[str, int], rules: str = ""
) -> list[str]:
    """A table of the axes that split something, and a line of bytes; empty with one device.

    Args:
        shape: sizes of the axes by name, outer to inner.
        slow: by how many parts of an axis a slow network connects, where it does.
        held: bytes of each part of a run on a device, by name.
        rules: of where parameters are stored, as `rule_words` has them.
    """
    axes = {axis: parts for axis, parts in shape.items() if parts > 1}
    if not axes:
        return []
    names = max(map(len, axes))
    digits = max(len(f"{parts:,}") for parts in axes.values())
    lines = ["mesh:"]
    for axis, parts in axes.items():
        line = f"  {axis:<{names}}  {parts:>{digits},}  {_SPLIT[axis]}"
        if axis in slow:
            line += f" ({slow[axis]:,} over the slow network)"
        lines.append(line)
    if rules:
        lines.append(f"  parameters are stored by {rules}")
    parts_held = ", ".join(f"{size(count)} {name}" for name, count in held.items())
    lines.append(f"  a device holds {parts_held}")
    return lines
