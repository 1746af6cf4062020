"""The stricter world tests run in: eight devices, strict dtypes, checked shapes, and compiled programs kept between runs.

`MAXTRAIN_TEST_PLATFORM=cuda` (or tpu) runs the tests on real devices instead of eight simulated CPUs. Tests of rooms that
need no jax do not pay for its import when they run alone.
"""

import functools
import os
import time
from pathlib import Path

import jaxtyping

TESTS = Path(__file__).parent
ROOMS_WITHOUT_JAX = ("data_pipeline", "config")
CACHE = Path("~/.cache/maxtrain/jax-tests").expanduser()
CACHE_DAYS = 30
PLATFORM = os.environ.get("MAXTRAIN_TEST_PLATFORM", "cpu")

# In the environment, so that processes started by tests are on the same platform; before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu" if PLATFORM == "cpu" else f"{PLATFORM},cpu"

# Every call into maxtrain checks its shapes and types. The tower: an int is fine where a float is asked for, as in PEP 484.
jaxtyping.install_import_hook("maxtrain", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


@functools.cache
def set_up_jax() -> None:
    """Import and configure jax, once, before a test module can touch a device."""
    import jax  # noqa: PLC0415

    if PLATFORM == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    # Tests compile many small programs: keeping all of them made a second run 3.5 times faster, a threshold of 50 ms only 1.2.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # The cache's own limit reads the whole directory at every write, so old entries are removed here.
    for entry in CACHE.glob("*-cache"):
        if time.time() - entry.stat().st_mtime > CACHE_DAYS * 86_400:
            entry.unlink(missing_ok=True)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Before a test module is imported: jax is set up, unless its room does without."""
    if module_path.is_relative_to(TESTS) and module_path.relative_to(TESTS).parts[0] not in ROOMS_WITHOUT_JAX:
        set_up_jax()
