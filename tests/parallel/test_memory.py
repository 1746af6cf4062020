"""Limits of devices, bytes of compiled programs, and the search for the largest one that fits,
against looking at all."""

import os
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError
from maxtrain.parallel.memory import (
    available_memory,
    fewest,
    largest,
    memory_in_use,
    memory_limit,
    program_bytes,
)
from maxtrain.trainer.abstract_step import StepMemory


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 300), st.integers(0, 500), st.sampled_from([0.0, 0.5, 1.0, 37.0]), st.sampled_from([0.0, 0.01, 3.0]),
    st.integers(0, 20_000), st.integers(1, 400), st.sampled_from([0.0, 0.01, 0.2]),
)  # fmt: skip
def test_the_largest_that_fits_is_that_of_a_linear_scan(
    most, fixed, linear, square, limit, refused, within
):
    def needed(n):
        return None if n >= refused else int(fixed + linear * n + square * n * n)

    def measure(n):
        assert 1 <= n <= most and n not in tried, "nothing is measured twice"
        tried.append(n)
        return needed(n)

    tried: list[int] = []
    fitting = [n for n in range(1, most + 1) if needed(n) is not None and needed(n) <= limit]
    right = max(fitting, default=0)
    found = largest(measure, limit, most, within)
    assert (
        found in (0, *tried)
        and right <= found + max(0, within * found)
        and (found == right or found * within >= 1)
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=12, unique=True), st.integers(0, 500), st.integers(0, 300),
    st.integers(0, 5000), st.integers(0, 4000), st.integers(0, 30),
)  # fmt: skip
def test_the_fewest_parts_that_fit_are_those_of_a_linear_scan(
    counts, state, gradients, activations, limit, refused_up_to
):
    choices = sorted(counts)

    def needed(n):
        return None if n < refused_up_to else state + gradients + activations // n

    def measure(n):
        assert n not in tried, "nothing is measured twice"
        tried.append(n)
        return needed(n)

    tried: list[int] = []
    fitting = [n for n in choices if needed(n) is not None and needed(n) <= limit]
    found = fewest(choices, measure, state, limit)
    assert found.count == next(iter(fitting), None)
    if found.count is None:
        assert found.before.count == choices[-1]
        return
    assert found.needed == needed(found.count)
    before = [n for n in choices if n < found.count]
    assert (found.before is None) == (not before)
    if before:
        assert found.before.count == before[-1]
        right = needed(before[-1])
        if right is not None:
            assert found.before.num_bytes <= right
            assert found.before.is_bound or found.before.num_bytes == right


def test_parts_that_can_not_fit_are_not_measured():
    tried = []
    need = lambda n: tried.append(n) or 100 + 6400 // n  # noqa: E731
    found = fewest([1, 2, 4, 8, 16, 32, 64], need, fixed=100, limit=350)
    assert (found.count, tried) == (32, [1, 32])
    assert found.before.words() == "at least 0.00 MiB" and found.before.num_bytes == 500


def test_a_linear_need_takes_few_tries():
    tried = []
    assert largest(lambda n: tried.append(n) or 1000 + 50 * n, 51_037, 1 << 20) == 1000
    assert len(tried) <= 7, tried


def test_one_percent_less_spares_tries():
    """Bytes that jump, as a compiler's do."""
    counts = []
    for within in (0.0, 0.01):
        tried = []
        found = largest(
            lambda n, tried=tried: tried.append(n) or 10_000 + 400 * n + 300_000 * (n // 700),
            32_000_000,
            1 << 20,
            within,
        )
        counts.append(len(tried))
        right = max(
            n for n in range(1, 50_000) if 10_000 + 400 * n + 300_000 * (n // 700) <= 32_000_000
        )
        assert (1 - within) * right <= found <= right
    assert counts[1] <= counts[0] - 2, counts


def test_bytes_of_a_program_are_what_goes_in_comes_out_and_lies_between():
    size = 256 * 256 * 4
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    kept, given_away = (jax.jit(lambda a: a @ a, donate_argnums=d).lower(shape) for d in ((), 0))
    assert 2 * size <= program_bytes(kept.compile()) < 2.5 * size
    chain = jax.jit(lambda a: jnp.sin(a @ a) @ a + a, donate_argnums=0).lower(shape)
    assert (
        size <= program_bytes(given_away.compile())
        and 2 * size <= program_bytes(chain.compile()) < 4 * size
    )


def test_a_compiler_that_finds_too_little_memory_is_not_a_crash_but_other_errors_are():
    def compile_refused(message: str) -> int | None:
        memory = StepMemory.__new__(StepMemory)
        memory.compile = Mock(side_effect=jax.errors.JaxRuntimeError(message))
        return memory.bytes(8, 32)

    assert compile_refused("RESOURCE_EXHAUSTED: Ran out of memory on HBM") is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_refused("INTERNAL: something else")


class MemoryDevice:
    platform = "gpu"

    def __init__(self, kind, stats=None):
        self.device_kind, self.stats = kind, stats

    def memory_stats(self):
        return self.stats


def test_the_limit_is_what_the_device_says_or_the_table_or_a_share_of_the_host():
    assert memory_limit(MemoryDevice("NVIDIA H100", {"bytes_limit": 123})) == 123
    for kind, gib in (
        ("TPU v5 lite", 16),
        ("TPU v5", 96),
        ("TPU v6 lite", 32),
        ("TPU v4", 16),
        ("TPU7x", 96),
    ):
        assert 0.95 < memory_limit(MemoryDevice(kind), described=True) / (gib << 30) < 1, (
            "a little is not for programs"
        )
    with pytest.raises(
        ConfigError, match=r"no memory is known for 'TPU v99'\. Give it with --memory BYTES"
    ):
        memory_limit(MemoryDevice("TPU v99"), described=True)
    if jax.default_backend() == "cpu":
        share = memory_limit(jax.devices()[0])
        assert share == pytest.approx(available_memory() / jax.local_device_count(), rel=0.3)


def test_available_memory_minds_control_groups(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory(tmp_path) == 4_096_000
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000000\n")
    for limit, expected in (
        ("max", 4_096_000),
        ("3000000", 2_000_000),
        ("900000", 0),
        ("99000000", 4_096_000),
    ):
        (group / "memory.max").write_text(f"{limit}\n")
        assert available_memory(tmp_path) == expected
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.stat").write_text(
        "anon 5\nfile 700000\ninactive_file 500000\nactive_file 200000\nslab 9\n"
    )
    assert available_memory(tmp_path) == 2_700_000, "the cache of files makes room"
    (group / "memory.stat").write_text(
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 300000\ntotal_active_file 100000\n"
    )
    assert available_memory(tmp_path) == 2_400_000
    assert available_memory(tmp_path / "elsewhere") > 0


def test_memory_in_use_is_that_of_the_fullest_device_and_of_the_process(tmp_path):
    devices = [
        MemoryDevice("H100", {"bytes_in_use": 5, "peak_bytes_in_use": 7}),
        MemoryDevice("H100", {"bytes_in_use": 3, "peak_bytes_in_use": 9}),
    ]
    assert memory_in_use(devices, tmp_path) == {"device_bytes": 5, "device_peak_bytes": 9}
    assert memory_in_use([MemoryDevice("H100", {"bytes_limit": 5})], tmp_path) == {}, (
        "what is not said is left out"
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("100 12 3 1 0 2 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert memory_in_use([jax.devices("cpu")[0]], tmp_path) == {"host_bytes": 12 * page}
    # This test alone has hundreds of megabytes of programs.
    assert memory_in_use([])["host_bytes"] > 1e8
