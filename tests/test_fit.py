"""`maxtrain fit`: the real step, compiled for TPUs and GPUs that are not here."""

import json
import platform
import sys

import jax
import pytest

from data_pipeline.errors import ConfigError
from maxtrain import fit_search
from maxtrain.cli import main
from maxtrain.config import load_config
from maxtrain.fit_report import advice
from maxtrain.fit_search import Mesh, meshes, search
from maxtrain.fitting import Fit, batch_shape, fit_step, require_fit
from maxtrain.models.cost import token_flops
from maxtrain.parallel.compiled.roofline import Line, Roofline
from maxtrain.parallel.topologies import described_devices

pytestmark = pytest.mark.usefixtures("this_process")
# Their compilers are for this platform alone; there, a missing package fails the test.
on_linux_x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="libtpu and XLA's compiler for GPUs are for Linux on x86",
)
SMALL = [
    "model.vocab_size=512",
    "model.num_layers=3",
    "model.embed_dim=128",
    "model.mlp_dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "model.max_length=256",
    "model.remat=full",
    "data.seq_length=256",
]


@pytest.fixture(autouse=True)
def as_by_users():
    """Compiled with all optimizations; programs for devices elsewhere can't be read from a cache."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.config.update("jax_enable_compilation_cache", True)


def record_of(folder, *words):
    """What the command writes; it must succeed."""
    assert main(["fit", *SMALL, *words, f"output_dir={folder}", "run_name=fitted"]) == 0
    return json.loads((folder / "fitted" / "fit.json").read_text())


@pytest.mark.long
@on_linux_x86
def test_a_step_on_gpus(tmp_path, capfd):
    words = ["config=llama3_8b", "topology=h100:8", "data.batch_size=32"]
    found = record_of(tmp_path, *words, "optimizer.accumulation=2")
    print(json.dumps(found, indent=1))
    raise AssertionError
