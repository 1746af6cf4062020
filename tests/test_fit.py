"""`maxtrain fit`: the real step, compiled for TPUs and GPUs that are not here."""

import json
import platform
import sys

import jax
import pytest

from maxtrain.cli import main

pytestmark = pytest.mark.usefixtures("this_process")
# Their compilers are for this platform alone; there, a missing package fails the test.
on_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="libtpu and XLA's compiler for GPUs are for Linux on x86",
)
SMALL = [
    "config=llama3_8b",
    "model.vocab_size=512",
    "model.num_layers=3",
    "model.embed_dim=128",
    "model.mlp_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "model.max_length=256",
    "data.seq_length=256",
    "data.batch_size=8",
]


@pytest.fixture
def fitted(tmp_path, capfd):
    """Runs the command, which must succeed; what it writes and what it prints. Compiled with all
    optimizations; programs for devices elsewhere can't be read from a cache."""

    def run(*words: str) -> tuple[dict, str]:
        arguments = ["fit", *SMALL, *words, f"output_dir={tmp_path}", "run_name=fitted"]
        code = main(arguments)
        shown = capfd.readouterr()
        assert code == 0, shown.err
        return json.loads((tmp_path / "fitted" / "fit.json").read_text()), shown.out

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield run
    jax.config.update("jax_disable_most_optimizations", before)
    jax.config.update("jax_enable_compilation_cache", True)


def by_kind(record):
    """Count and bytes of collectives, by kind and axes."""
    return {
        (line["kind"], *line["axes"]): (line["count"], line["num_bytes"])
        for line in record["collectives"]
    }


@pytest.mark.long
@on_linux_x86
def test_a_step_on_gpus(fitted):
    record, shown = fitted("topology=h100:8", "optimizer.accumulation=1", "mesh.fsdp=8")
    print(json.dumps(record, indent=1), shown)
    raise AssertionError


@pytest.mark.long
@on_linux_x86
def test_a_step_on_tpus(fitted):
    record, shown = fitted("topology=v5p:2x2x2", "mesh.fsdp=8")
    print(json.dumps(record, indent=1), shown)
    raise AssertionError


@pytest.mark.long
@on_linux_x86
@pytest.mark.parametrize(
    ("topology", "attention"),
    [
        ("v5p:2x2x1", "ring"),
        ("v5p:2x2x1", "xla"),
        pytest.param("h100:4", "ring", marks=pytest.mark.slow),
        pytest.param("h100:4", "xla", marks=pytest.mark.slow),
    ],
)
def test_parts_of_rows_go_round_or_are_dealt_out(fitted, topology, attention):
    words = ["mesh.fsdp=1", "mesh.context=4", f"model.attention={attention}"]
    record, _ = fitted(f"topology={topology}", *words)
    print(json.dumps(record, indent=1))
    raise AssertionError


@pytest.mark.long
@on_linux_x86
def test_a_search_on_tpus(fitted):
    words = ["--search", "--tries", "2", "--memory", "100MiB"]
    record, shown = fitted("topology=v5p:2x2x1", *words)
    print(json.dumps(record, indent=1)[:3000], shown)
    raise AssertionError
