"""The stricter world tests run in: eight devices, strict dtypes, checked shapes, and compiled
programs kept between runs.

Almost all tests compile their programs without LLVM's optimizations, in half the time; those of
roundings and of bits that were written down do it as users do. With `--quickly`, as `make test`
runs them, all do the first: what then fails for its numbers is long or slow. And shapes and types
are checked of calls into maxtrain.ops alone, where arrays meet: checking all of maxtrain takes a
third of the time of tests that are short.

`MAXTRAIN_TEST_PLATFORM=cuda` (or tpu) runs the tests on real devices instead of eight simulated
CPUs. Tests of rooms that need no jax do not pay for its import when they run alone.
"""

import collections
import functools
import hashlib
import logging
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import pytest

from benchmarks.faulty_s3 import FaultyS3
from tests.support.pretrained import write as write_pretrained
from tests.support.shared import TINY_MODEL, WORDS

TESTS = Path(__file__).parent
# Beginnings of paths: these tests need no jax.
ROOMS_WITHOUT_JAX = ("data_pipeline/", "config/", "storage/", "rl/rewards/", "rl/test_advantages")
# Beginnings of paths: tests of roundings and of bits that were written down.
COMPILED_AS_BY_USERS = (
    "ops/",
    "runs/test_released_runs",
    "commands/test_replay",
    "train_step/test_accumulation",
    "train_step/test_step",
    "train_step/test_trajectory",
    "train_step/test_zero",
    "weights/test_hf",
)
# Minutes each: they are handed to the workers first, so that none is left alone with one at the end.
LONGEST = (
    "commands/launch/test_slurm_real.py",
    "commands/serve/test_command.py",
    "trainer/test_forks.py",
    "runs/test_processes.py",
    "docs/test_data.py",
    "commands/test_replay.py",
    "commands/test_supervise.py",
    "runs/test_train.py",
    "benchmarks/test_chaos.py",
    "runs/test_anomalies.py",
    "docs/test_reliability.py",
    "docs/test_numerics.py",
    "runs/test_quickstart.py",
    "benchmarks/test_benchmarks.py",
    "train_step/test_products.py",
    "train_step/test_trajectory.py",
    "models/test_lora.py",
    "models/test_quantized.py",
    "runs/test_quantized_runs.py",
    "runs/test_expert_runs.py",
    "models/test_moe.py",
    "commands/export/test_command.py",
    "weights/test_hf.py",
    "commands/test_import_hf.py",
    "inference/test_engine.py",
    "docs/test_fine_tuning.py",
    "train_step/test_step.py",
    "trainer/test_signals.py",
    "trainer/test_run_dir.py",
    "runs/test_kept.py",
    "runs/test_train_checkpoints.py",
    "runs/test_train_data.py",
    "models/test_decoder.py",
    "commands/probe/test_command.py",
    "commands/test_generate.py",
    "models/test_tpu.py",
    "runs/test_evaluation_sets.py",
    "runs/test_released_runs.py",
    "runs/test_train_fuzz.py",
    "checkpoint/test_manager.py",
    "data_pipeline/prepare/test_runner.py",
    "data_pipeline/prepare/test_prepare_url.py",
)
# Of so many long tests, a dose has one.
SHARE = 24
# Marks of tests that only run by name, or with every dose: none of these is drawn.
NOT_DRAWN = ("slow", "gpu", "every_dose")
# As many random examples as a test of `make test` gets; what says that it takes fewer, does.
QUICK_EXAMPLES = 25
CACHE = Path("~/.cache/maxtrain/jax-tests").expanduser()
CACHE_DAYS = 30
PLATFORM = os.environ.get("MAXTRAIN_TEST_PLATFORM", "cpu")

# In the environment, so that processes started by tests have the same platform and cache; before
# anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu" if PLATFORM == "cpu" else f"{PLATFORM},cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
# Tests compile many small programs: keeping all of them made a second run 3.5 times faster, a
# threshold of 50 ms only 1.2.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Processes started by tests keep their bytecode, as those of users do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What checks calls. The tower: an int is fine where a float is expected, as in PEP 484.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

# A busy machine is no failure, so no example has a deadline.
hypothesis.settings.register_profile("quick", max_examples=QUICK_EXAMPLES, deadline=None)
hypothesis.settings.register_profile("thorough", deadline=None)
hypothesis.settings.load_profile("thorough")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quickly",
        action="store_true",
        help="compile the programs of all tests without optimizations, and check shapes and types of "
        "calls into maxtrain.ops alone",
    )
    parser.addoption(
        "--dose",
        type=int,
        default=1,
        metavar="N",
        help="run a twenty-fourth of the long tests, and one in N of their parameters; "
        "other ones with each commit; 1: all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Calls into maxtrain check their shapes and types; before anything imports it."""
    checked = "maxtrain.ops" if config.getoption("--quickly") else "maxtrain"
    jaxtyping.install_import_hook(checked, CHECKER)


def pytest_itemcollected(item: pytest.Item) -> None:
    """`--hypothesis-profile quick` also holds for tests that ask for more examples by name."""
    if hypothesis.settings.get_current_profile_name() != "quick":
        return
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > QUICK_EXAMPLES:
        fewer = hypothesis.settings(own, max_examples=QUICK_EXAMPLES)
        test._hypothesis_internal_use_settings = fewer


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that take longest come first; the tests of a file stay in their order. What is
    beyond the dose is left out."""

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(TESTS).as_posix()
        if name in LONGEST:
            return LONGEST.index(name)
        return len(LONGEST)

    items.sort(key=place)
    dose = config.getoption("--dose")
    if dose > 1:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=TESTS)
        left_out = beyond_the_dose(items, dose, commit)
        config.hook.pytest_deselected(items=left_out)
        ids = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in ids]


def beyond_the_dose(items: list[pytest.Item], dose: int, commit: bytes) -> list[pytest.Item]:
    """All but one in SHARE of the long tests, evenly through the files, and all but one in `dose` of
    the parameters of each of these, rounded up. NOT_DRAWN have no part in it."""

    def drawn(name: str) -> bytes:
        return hashlib.blake2b(commit + name.encode()).digest()

    of_tests = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") and not any(map(item.get_closest_marker, NOT_DRAWN)):
            of_tests[item.nodeid.split("[")[0]].append(item)
    names = sorted(of_tests, key=lambda name: (name.split("::")[0], drawn(name)))
    first = int.from_bytes(drawn("")) % SHARE
    taken = set(names[first::SHARE])
    left_out = []
    for name, parameters in of_tests.items():
        share = 0
        if name in taken:
            share = math.ceil(len(parameters) / dose)
        left_out += sorted(parameters, key=lambda item: drawn(item.nodeid))[share:]
    return left_out


@functools.cache
def set_up_jax() -> None:
    """Import and configure jax, once, before a test module can touch a device."""
    import jax  # noqa: PLC0415

    from maxtrain.parallel.distributed import wait_for_slow_devices  # noqa: PLC0415

    if PLATFORM == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
        wait_for_slow_devices()  # a busy machine is no failure; processes that tests start inherit it
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    keep_programs_of_one_device()
    # The cache's own limit reads the whole directory at every write, so old entries are removed
    # here.
    for entry in CACHE.glob("*-cache"):
        if time.time() - entry.stat().st_mtime > CACHE_DAYS * 86_400:
            entry.unlink(missing_ok=True)


def keep_programs_of_one_device() -> None:
    """Programs for several CPUs are not read from the cache; see `distributed.start`. It turns the
    cache off, which jax no longer heeds once it has compiled something."""
    import jax  # noqa: PLC0415
    from jax._src import compiler  # noqa: PLC0415

    cache_key = compiler._get_cache_key

    def of_one_device(options, backend, computation, devices, *others, **named):
        if backend.platform == "cpu" and devices.size > 1:
            return None
        return cache_key(options, backend, computation, devices, *others, **named)

    compiler._get_cache_key = of_one_device
    jax.numpy.zeros(()).block_until_ready()


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Set up jax before a test module is imported, unless its folder does without."""
    if not module_path.is_relative_to(TESTS):
        return
    if not module_path.relative_to(TESTS).as_posix().startswith(ROOMS_WITHOUT_JAX):
        set_up_jax()


@pytest.fixture(scope="module", autouse=True)
def compiler(request: pytest.FixtureRequest) -> None:
    """Programs of a module, and of the processes that it starts, are compiled quickly, or as users
    compile them."""
    name = request.path.relative_to(TESTS).as_posix()
    all_quickly = request.config.getoption("--quickly")
    as_by_users = name.startswith(COMPILED_AS_BY_USERS) and not all_quickly
    quick = not as_by_users and PLATFORM == "cpu"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))
    if (jax := sys.modules.get("jax")) and jax.config.values[
        "jax_disable_most_optimizations"
    ] != quick:
        jax.config.update("jax_disable_most_optimizations", quick)
        jax.clear_caches()  # of programs that were compiled the other way


@pytest.fixture(scope="module")
def this_process() -> Iterator[None]:
    """Isolate the changes that a run makes to its process from later tests; Optax promotes counts
    to floats silently."""
    import jax  # noqa: PLC0415

    from maxtrain.parallel import distributed  # noqa: PLC0415

    level, precision = logging.getLogger("absl").level, jax.config.jax_default_matmul_precision
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(distributed, "keep_host_memory", lambda: "")
        yield
    jax.config.update("jax_default_matmul_precision", precision)
    logging.getLogger("absl").setLevel(level)


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    """A bucket of a local S3 server that can inject faults."""
    pytest.importorskip("s3fs", reason="needs maxtrain[s3]")
    with FaultyS3() as server:
        yield server


@pytest.fixture(scope="session")
def gs_server() -> Iterator[Any]:
    """A local server of gs://, with buckets of the names `bucket` and `faulty`; a FaultyGS."""
    pytest.importorskip("gcsfs", reason="needs maxtrain[gcs]")
    pytest.importorskip("gcp_storage_emulator", reason="needs gcp-storage-emulator")
    from tests.support.gcs import gcs_server  # noqa: PLC0415

    with gcs_server() as server:
        yield server


@pytest.fixture(scope="module", params=["s3", pytest.param("gs_server", marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A bucket of a local server of s3://, or of gs://, that can inject faults: a FaultyS3, or a
    FaultyGS."""
    server = request.getfixturevalue(request.param)
    server.begin([])
    yield server
    server.begin([])


@pytest.fixture(scope="session")
def tiny_run() -> Callable[..., Path]:
    """Makes a folder of made-up text, its shards in `data`, and a config file of a tiny run beside
    them."""
    import yaml  # noqa: PLC0415

    from data_pipeline.prepare import command as prepare  # noqa: PLC0415

    def make(folder: Path, *options: str, texts: int = 40, **sections: object) -> Path:
        """The config file. `options` are of prepare; `sections` replace keys, or add to those of a
        section."""
        rng = random.Random(0)
        for number in range(texts):
            (folder / f"{number}.txt").write_text(
                " ".join(rng.choices(WORDS, k=rng.randrange(20, 120)))
            )
        assert (
            prepare.main(
                [str(folder / "data"), "--text", f"{folder}/*.txt", "--workers", "1", *options]
            )
            == 0
        )
        train = folder / "data" / "train" if "--holdout" in options else folder / "data"
        values = {
            "output_dir": str(folder / "runs"),
            "log_interval": 1,
            "eval_interval": 0,
            "model": TINY_MODEL,
            "data": {
                "sources": {"text": {"path": str(train), "epochs": None}},
                "seq_length": 32,
                "batch_size": 8,
            },
            "mesh": {"data": 2, "fsdp": 4, "simulated_devices": 8},
            "observe": {
                "progress": "plain",
                "trackers": [],
                "plot": False,
                "peak_tflops": 1.0,
                "compilation_cache": None,
            },
        }
        for name, value in sections.items():
            values[name] = values.get(name, {}) | value if isinstance(value, dict) else value
        (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
        return folder / "tiny.yaml"

    return make


@pytest.fixture(scope="session")
def pretrained_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See tests/support/pretrained.py."""
    folder = tmp_path_factory.mktemp("pretrained")
    write_pretrained(folder)
    return folder
