"""Sums of small numbers are learnt from rewards alone, after a start that only knows the form; and
not where advantages are those of other completions.

Each run is a process of its own with one device: eight simulated ones would take minutes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.processes


def learnt(folder: Path, steps: int, *options: str) -> dict:
    """What `tests.rl.additions_run` says of such a run."""
    command = [sys.executable, "-m", "tests.rl.additions_run", str(folder), str(steps), *options]
    # Programs that run for long are worth their compilation.
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.long
def test_sums_are_learnt_from_rewards(tmp_path):
    found = learnt(tmp_path, 130)
    assert found["gain"] >= 0.7
    assert found["right"] >= 0.6
    assert found["form"] >= 0.95
    assert found["sampler_gap"] < 1e-5


@pytest.mark.slow
def test_sums_are_learnt_with_values_of_tokens(tmp_path):
    found = learnt(tmp_path, 130, "ppo")
    assert found["gain"] >= 0.6
    assert found["form"] >= 0.9
    assert found["explained_variance"] >= 0.2
    assert found["sampler_gap"] < 1e-5


@pytest.mark.slow
def test_advantages_of_other_completions_teach_nothing(tmp_path):
    found = learnt(tmp_path, 60, "shuffled")
    assert found["gain"] < 0.1
