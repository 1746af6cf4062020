"""Shared parts of tests in several folders: words of synthetic texts, a model that trains in a
moment, and the small models of other families in tests/data/parity."""

import resource
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

WORDS = "the of and to in is that it was for on are as with his they".split()
TINY_MODEL = {
    "num_layers": 1,
    "embed_dim": 16,
    "mlp_dim": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "max_length": 32,
}
# Of Llama and Qwen 3, the first families.
FIRST_PARITY_CASES = ("llama3", "llama_tied_mha", "qwen3")
MORE_PARITY_CASES = (
    "mistral",
    "qwen2",
    "olmo2",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_unnormalised",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
)
PARITY_CASES = FIRST_PARITY_CASES + MORE_PARITY_CASES
# One of each kind of block, for tests that take seconds a family: dense, windows, experts, latents.
KINDS_OF_BLOCKS = ("llama3", "gemma3", "mixtral", "deepseek_v3")


def in_time(cases: Iterable[str], kinds: Iterable[str] = KINDS_OF_BLOCKS) -> list:
    """Parameters: those that are one of a kind are long, the others slow."""
    found = []
    for case in cases:
        mark = pytest.mark.slow
        if case in kinds:
            mark = pytest.mark.long
        found.append(pytest.param(case, marks=mark))
    return found


def timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess, float]:
    """Run a process and return its output and the seconds of CPU that it took. `options` go to
    subprocess.run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def half_a_second() -> float:
    """Seconds of CPU: 0.5, and more on a slow core or one that is shared now, by what a process
    takes there that imports two libraries and does nothing."""
    done, seconds = timed([sys.executable, "-c", "import ml_collections, yaml"])
    assert done.returncode == 0, done.stderr
    return max(0.5, 4 * seconds)
