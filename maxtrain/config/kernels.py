"""What each kernel of attention can do: the one table that the checks, the launch and the tests go
by."""

from typing import NamedTuple


class Kernel(NamedTuple):
    """One kernel."""

    platform: str | None = None  # the only one that has it; None: all have
    segments: bool = True  # keeps the documents of a row apart
    caches: bool = True  # reads the caches of generation
    sinks: bool = True  # has a learned logit of each head beside those of the keys
    softcap: bool = True  # can bound scores
    values: bool = True  # values may have another size than keys
    repeats: bool = True  # its backward pass gives the same bits every time
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")  # of inputs
    head_dim: tuple[int, int] | None = None  # the largest, and what it must be a multiple of
    rows: int = 1  # what their length must be a multiple of
    context: bool = False  # only where rows are split over devices


ATTENTION = {
    "eager": Kernel(),
    "xla": Kernel(),
    "cudnn": Kernel(
        "gpu",
        segments=False,
        caches=False,
        sinks=False,
        softcap=False,
        values=False,
        repeats=False,
        dtypes=("float16", "bfloat16"),
        head_dim=(128, 8),
    ),
    "ring": Kernel(caches=False, context=True),
    "flash": Kernel(
        "tpu",
        caches=False,
        sinks=False,
        values=False,
        dtypes=("float32", "bfloat16"),
        rows=128,
    ),
}
