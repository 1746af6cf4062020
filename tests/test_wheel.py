"""What `pip install` of the built package brings: both packages, the configs and descriptions of GPUs; nothing of tests,
benchmarks or caches."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_packages_and_the_configs(tmp_path):
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        tmp_path,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [wheel] = tmp_path.glob("maxtrain-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [
        path.relative_to(ROOT).as_posix()
        for top in ["maxtrain", "data_pipeline"]
        for path in ROOT.glob(f"{top}/**/*.py")
    ]
    configs = [f"maxtrain/configs/{path.name}" for path in ROOT.glob("configs/*.py")]
    cards = [f"maxtrain/parallel/gpu_targets/{card}.txtpb" for card in ("h100", "h200", "b200")]
    assert names == {*sources, *configs, *cards}
