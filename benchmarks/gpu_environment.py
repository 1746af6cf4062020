"""Environment of `make test-gpu` and `make bench-gpu` on a machine that has its own jax.

    python -m benchmarks.gpu_environment FOLDER

It writes three files into the virtual environment FOLDER: `needed.txt`, the packages that maxtrain
and its tests need; `present.txt`, the versions that this Python has, so that pip keeps them; and a
.pth file with which the environment sees this Python's packages. (If this Python is itself an
environment, `--system-site-packages` would show only the system's packages.) It needs the standard
library only.
"""

import re
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Of the packages in [dev], those that tests of models and of their kernels are run with.
OF_TESTS = ("pytest", "pytest-xdist", "hypothesis", "beartype")
PTH = "packages_of_the_machine.pth"


def needed(project: dict) -> list[str]:
    """The requirements of maxtrain, and of its tests on a GPU."""
    requirements = list(project["dependencies"])
    for requirement in project["optional-dependencies"]["dev"]:
        name = re.match(r"[\w-]+", requirement)
        if name and name[0] in OF_TESTS:
            requirements.append(requirement)
    return requirements


def present() -> list[str]:
    """The packages of this Python with their versions."""
    versions = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        # Of two that have the same name, the first one is imported. One that was built for this
        # machine has a version of its own (+cuda13), which no constraint may name.
        if name and "+" not in distribution.version:
            versions.setdefault(name, distribution.version)
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def main(arguments: list[str]) -> int:
    """Write the three files; the exit code."""
    if len(arguments) != 1:
        print("usage: python -m benchmarks.gpu_environment FOLDER", file=sys.stderr)
        return 64
    folder = Path(arguments[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (folder / "needed.txt").write_text("\n".join(needed(project)) + "\n")
    (folder / "present.txt").write_text("\n".join(present()) + "\n")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / PTH).write_text(sysconfig.get_path("purelib") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
