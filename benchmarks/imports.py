"""Speed of reading and importing the weights of a Hugging Face directory, compared with the
disk's own speed; and the memory that it takes.

    python -m benchmarks.imports [--mb 1000] [--rounds 3] [--directory DIR]

prints the table of benchmarks/results/imports.md. Each reading is a process of its own, so that its
largest use of memory is known, and begins when the kernel has forgotten the files.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from benchmarks.checkpoint import forget, memory, read_in_chunks
from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.commands import import_hf as imports
from maxtrain.commands.import_hf import import_weights
from maxtrain.config.schema import MeshConfig, ModelConfig, ObserveConfig, PrecisionConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_config
from maxtrain.models.hf_mapping import LazyArray, Part
from maxtrain.ops.digest import leaf_names
from maxtrain.parallel.distributed import start
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model
from maxtrain.weights.hf import load_weights, tensor_files
from maxtrain.weights.hf_export import write_config, write_tensors

# Of the parameters: as in models of a billion parameters, with an embedding and a head that are a
# good part of it.
_WIDTH = 1024
_VOCABULARY = 32_000
# Type of the tensors, type of the parameters, and the number of files.
CASES = (
    ("float32", "float32", 1),
    ("float32", "float32", 4),
    ("bfloat16", "bfloat16", 1),
    ("bfloat16", "bfloat16", 4),
    ("bfloat16", "float32", 1),
)


def model_of(num_bytes: int, itemsize: int, width: int) -> ModelConfig:
    """Return the config of a model of about `num_bytes` bytes."""
    vocabulary = min(_VOCABULARY, width * 32)
    of_layer = 4 * width * width + 3 * width * 4 * width
    left = num_bytes / itemsize - 2 * vocabulary * width
    return ModelConfig(
        vocab_size=vocabulary,
        num_layers=max(1, round(left / of_layer)),
        embed_dim=width,
        mlp_dim=4 * width,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        max_length=512,
    )


def write_model(directory: Path, config: ModelConfig, dtype: str, num_files: int) -> None:
    """Random weights as a Hugging Face directory."""
    directory.mkdir()
    tokenizer = ByteTokenizer()
    write_config(directory, config, dtype, tokenizer)
    tokenizer.save(directory)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in sorted(shapes_of(config).items()):
        tensors[name] = LazyArray(shape, functools.partial(random_numbers, rng, shape))
    total = sum(math.prod(tensor.shape) for tensor in tensors.values()) * jnp.dtype(dtype).itemsize
    # Files are not filled quite.
    most = math.ceil(total / num_files * 1.05)
    write_tensors(directory, tensors, dict.fromkeys(tensors, dtype), most, lambda line: None)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a model."""
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    _, abstract = abstract_model(config, PrecisionConfig(), mesh)
    leaves = dict(zip(leaf_names(abstract), jax.tree.leaves(abstract), strict=True))
    shapes = {}
    for entry in FAMILIES[config.family].table(config):
        shapes |= entry.tensor_shapes([leaves[name].shape for name in entry.params])
    return shapes


def random_numbers(rng: np.random.Generator, shape: tuple[int, ...], part: Part) -> np.ndarray:
    """A tensor, whole."""
    del part
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)


def touch(num_bytes: int) -> None:
    """Has the kernel use so much memory and give it back. A virtual machine gets memory that it has
    not used lately from its host, at a fraction of a disk's speed: what is timed is to pay for
    none.

    The memory is taken as numpy takes that of large arrays, in pages of 2 MiB: a kernel hands free
    blocks of that size to the host and takes small pages from others, so that small ones say
    nothing about them."""
    subprocess.run(
        [sys.executable, "-c", f"import numpy; numpy.ones({num_bytes}, 'u1')"], check=True
    )


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Notes how long a step of the import takes."""
    step = getattr(imports, name)

    def with_clock(*args: Any) -> Any:
        begin = time.perf_counter()
        result = jax.block_until_ready(step(*args))
        seconds[name] = time.perf_counter() - begin
        return result

    with mock.patch.object(imports, name, with_clock):
        yield


def one(what: str, directory: Path, dtype: Literal["float32", "bfloat16"]) -> dict[str, float]:
    """Measure, in a process of its own, the seconds, and the memory beyond what the process had
    before, of reading the weights or of the whole import, with the seconds of each step of the
    import.
    """
    # As the command does: programs that were compiled before are kept.
    start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    config = read_config(directory)
    precision = PrecisionConfig(params=dtype, compute=dtype)
    _, abstract = abstract_model(config, precision, mesh)
    size = sum(leaf.size for leaf in jax.tree.leaves(abstract)) * jnp.dtype(dtype).itemsize
    jax.block_until_ready(jax.jit(jnp.sum)(jnp.ones(8)))
    steps: dict[str, float] = {}
    touch(3 * size)
    before = memory("VmRSS")
    begin = time.perf_counter()
    if what == "safetensors":
        # As it is: neither transposed nor stacked, rounded or looked at.
        held = [load_file(path) for path in tensor_files(directory)]
    elif what == "load":
        held = jax.block_until_ready(load_weights(abstract, directory, config))
    else:
        with timed("_write", steps), timed("_read_back", steps):
            held = import_weights(directory, directory.with_name("run"), dtype)
    seconds = time.perf_counter() - begin
    most = memory("VmHWM") - before
    del held
    return {"seconds": seconds, "memory": most / size} | steps


def in_a_process(what: str, directory: Path, dtype: str) -> dict[str, float]:
    """Run `one` in another process, after the kernel has forgotten the files."""
    forget(directory)
    command = [sys.executable, "-m", "benchmarks.imports", "--one", what, dtype]
    done = subprocess.run(
        [*command, "--directory", str(directory)], check=True, stdout=subprocess.PIPE, text=True
    )
    shutil.rmtree(directory.with_name("run"), ignore_errors=True)
    return json.loads(done.stdout)


def plain_seconds(directory: Path) -> float:
    """One sequential read of all files of tensors, after the kernel has forgotten them."""
    forget(directory)
    touch(sum(path.stat().st_size for path in tensor_files(directory)))
    begin = time.perf_counter()
    for path in tensor_files(directory):
        read_in_chunks(path)
    return time.perf_counter() - begin


def middle(runs: Sequence[dict[str, float]], name: str) -> float:
    """The median of a number over several runs."""
    return statistics.median(run[name] for run in runs)


def rows(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Lines of Markdown, one for each case. A reading is compared with the mean of the plain reads
    before and after it, since a machine may be busier at one time than at another."""
    columns = ["tensors", "files", "parameters", "MB", "plain read, s", "safetensors, s", "load, s"]
    columns += ["of the rate", "memory", "import, s", "saving, s", "reading back, s", "memory"]
    yield f"| {' | '.join(columns)} |"
    yield "|:--|--:|:--|" + "--:|" * 10
    cases = CASES
    if args.case is not None:
        cases = CASES[args.case : args.case + 1]
    for stored, dtype, num_files in cases:
        directory = folder / "model"
        config = model_of(args.mb * 10**6, jnp.dtype(stored).itemsize, args.width)
        write_model(directory, config, stored, num_files)
        size = sum(path.stat().st_size for path in tensor_files(directory))
        plain, shares, others, loads, wholes = [], [], [], [], []
        for _ in range(args.rounds):
            before = plain_seconds(directory)
            load = in_a_process("load", directory, dtype)
            after = plain_seconds(directory)
            shares.append((before + after) / 2 / load["seconds"])
            plain += [before, after]
            loads.append(load)
            others.append(in_a_process("safetensors", directory, dtype))
            wholes.append(in_a_process("import", directory, dtype))
        cells = [stored, str(len(tensor_files(directory))), dtype, f"{size / 1e6:,.0f}"]
        cells += [f"{statistics.median(plain):.2f}", f"{middle(others, 'seconds'):.2f}"]
        cells += [f"{middle(loads, 'seconds'):.2f}", f"{statistics.median(shares):.0%}"]
        cells.append(f"{max(load['memory'] for load in loads):.2f}")
        cells += [f"{middle(wholes, name):.2f}" for name in ("seconds", "_write", "_read_back")]
        cells.append(f"{max(whole['memory'] for whole in wholes):.2f}")
        yield f"| {' | '.join(cells)} |"
        shutil.rmtree(directory)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.imports", description=__doc__)
    add = parser.add_argument
    add("--mb", type=int, default=1000, help="of tensors (default: %(default)s)")
    add("--width", type=int, default=_WIDTH, help="of the model (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of each reading (default: %(default)s)")
    add("--directory", type=Path, help="where to write (default: the system's temporary directory)")
    add("--case", type=int, choices=range(len(CASES)), help="one case alone, by its number")
    add("--one", nargs=2, metavar=("WHAT", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        what, dtype = args.one
        of_type: Any = dtype
        print(json.dumps(one(what, args.directory, of_type)))
        return 0
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, jax {jax.__version__}\n")
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for row in rows(args, Path(folder)):
            print(row, flush=True)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
