"""Requirements on every Python that the package can be installed with: import every module without
a warning of ours, prepare data, train, resume and generate. `make test-python` runs this file alone
with another interpreter, and without the optional packages."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Prints the modules that can't be imported, and why. A package that is only for an extra may be
# missing: then its name is printed.
_IMPORT_ALL = """
import importlib, json, pkgutil, warnings
warnings.filterwarnings("error", module=r"(maxtrain|data_pipeline)\\b")
found = {}
for top in ("data_pipeline", "maxtrain"):
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, top + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            found[module.name] = error.name
        except BaseException as error:
            found[module.name] = repr(error)
print(json.dumps(found))
"""


def python(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.long
@pytest.mark.processes
def test_every_module_can_be_imported():
    result = python("-c", _IMPORT_ALL)
    assert result.returncode == 0, result.stderr
    missing = json.loads(result.stdout.splitlines()[-1])
    optional = {"starlette", "uvicorn", "h11", "prometheus_client", "llguidance", "gguf", "fsspec"}
    installed = importlib.metadata.packages_distributions()
    assert set(missing.values()) <= optional - installed.keys(), missing


@pytest.mark.long
@pytest.mark.processes
def test_a_tiny_model_trains_resumes_and_writes_text(tiny_run, tmp_path):
    config = tiny_run(tmp_path, steps=2, checkpoint_interval=2, schedule={"warmup_steps": 1})
    for steps in (2, 4):
        result = python("-m", "maxtrain.train", f"config={config}", f"steps={steps}")
        assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"Goes on from step 2\b", result.stdout)
    [run] = (tmp_path / "runs").iterdir()
    words = ["-m", "maxtrain.cli", "generate", str(run), "--prompt", "a", "--max-tokens", "4"]
    result = python(*words)
    assert result.returncode == 0 and result.stdout.startswith("a"), result.stderr
