"""docs/reliability.md runs as it stands, from top to bottom."""

import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text()
WORDS = ["if", "then", "else", "while", "page", "home"]


@pytest.mark.processes
def test_the_commands_work_in_order(tmp_path):
    rng = random.Random(0)
    (tmp_path / "web").mkdir()
    for number in range(100):
        (tmp_path / "web" / f"{number}.txt").write_text(" ".join(rng.choices(WORDS, k=100)))
    (program,) = re.findall(r"^```python\n# small\.py\n(.*?)^```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL | re.M)
    (tmp_path / "small.py").write_text(program)
    commands = ["maxtrain prepare data/web --text 'web/*.txt' --tokenizer bytes"]
    commands += "".join(re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)).splitlines()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "120"}
    outputs = []
    for command in commands:
        words = [sys.executable, "-m", "maxtrain.cli", *shlex.split(command)[1:]]
        result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        outputs.append(result.stdout)
    assert len(outputs) == 9
    assert "3 whole of 3" in outputs[2] and outputs[3].count("all hashes") == 3 and "params.layers" in outputs[4]
    assert outputs[6].count("all hashes") == 1
    assert sorted(path.name for path in (tmp_path / "runs" / "kept" / "checkpoints").iterdir()) == [
        "00000020",
        "00000030",
        "00000040",
    ]
