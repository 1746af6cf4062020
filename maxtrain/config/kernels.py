"""Table of attention kernels with their limits: the checks, the launch and the tests all use it."""

from typing import NamedTuple

# The value of model.attention that names no kernel: across/attention_choice.py chooses one.
AUTO = "auto"


class Kernel(NamedTuple):
    """Limits of one attention kernel."""

    platform: str | None = None  # the only one that has it; None: all have
    capability: tuple[int, int] | None = None  # the least compute capability of GPUs
    below: tuple[int, int] | None = None  # the first one that is too much for it
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
    by_name: bool = False  # auto never chooses it


ATTENTION = {
    "eager": Kernel(),
    "xla": Kernel(),
    "cudnn": Kernel(
        "gpu",
        capability=(8, 0),
        segments=False,
        caches=False,
        sinks=False,
        softcap=False,
        values=False,
        repeats=False,
        dtypes=("float16", "bfloat16"),
        head_dim=(128, 8),
    ),
    # No GPU has run it yet: interpreted, it equals eager, and it compiles for GPUs.
    "triton": Kernel(
        "gpu",
        capability=(8, 0),
        caches=False,
        sinks=False,
        softcap=False,
        values=False,
        dtypes=("float16", "bfloat16"),
        head_dim=(128, 1),
        rows=16,
        by_name=True,
    ),
    # No GPU has run it here yet, and it is a package in alpha: it compiles for H100.
    "mosaic": Kernel(
        "gpu",
        capability=(9, 0),
        below=(11, 0),
        caches=False,
        sinks=False,
        softcap=False,
        values=False,
        dtypes=("float16", "bfloat16"),
        head_dim=(128, 8),
        rows=128,
        by_name=True,
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


def candidates(platform: str | None, splits_rows: bool, drops_weights: bool) -> list[str]:
    """The kernels that auto may choose, the best first.

    eager keeps every score, so it is there only where no other kernel will do.

    Args:
        platform: of the devices; None: not known, so that none of one platform is there.
        splits_rows: whether rows are split over devices.
        drops_weights: whether attention weights are dropped.
    """
    if drops_weights:
        return ["eager"]
    found = []
    if splits_rows:
        found.append("ring")
    for name, can in ATTENTION.items():
        if platform is not None and can.platform == platform and not can.by_name:
            found.append(name)
    return [*found, "xla"]


def kernel_of_model(name: str) -> str:
    """The kernel of a model with this model.attention.

    A launch names one before it makes the model. Elsewhere neither rows nor devices are known, and
    auto is xla, which does all that any model needs on every device.
    """
    if name == AUTO:
        return "xla"
    return name
