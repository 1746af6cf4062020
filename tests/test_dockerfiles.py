"""The Dockerfiles, read as text: what they install, what they copy, and who runs there."""

import re
import tomllib
from pathlib import Path

import pytest

from maxtrain.commands.launch import kubernetes

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order, with their arguments."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        word, _, rest = line.partition(" ")
        found.append((word, rest.strip()))
    return found


def last(name: str, word: str) -> str:
    return [rest for found, rest in instructions(name) if found == word][-1]


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_it_installs_what_is_pinned_and_runs_without_rights(name):
    words = [word for word, _ in instructions(name)]
    assert last(name, "FROM") == "python:3.12-slim"
    assert "3.12" in PROJECT["project"]["requires-python"]
    install = [rest for word, rest in instructions(name) if word == "RUN" and "pip" in rest]
    assert install == ['python -m pip install --constraint constraints.txt ".[${EXTRAS}]"']
    extras = last(name, "ARG").removeprefix("EXTRAS=").split(",")
    assert extras[0] == name and set(extras) <= PROJECT["project"]["optional-dependencies"].keys()
    # A run may be in a bucket of either.
    assert {"s3", "gcs"} <= set(extras)
    # Nothing is done as root after this.
    assert last(name, "USER") == "maxtrain"
    assert "RUN" not in words[words.index("USER") :]
    (made,) = [rest for word, rest in instructions(name) if word == "RUN" and "useradd" in rest]
    assert f"--uid {kubernetes.USER} " in made
    assert last(name, "ENTRYPOINT") == '["maxtrain"]'
    assert PROJECT["project"]["scripts"] == {"maxtrain": "maxtrain.cli:main"}


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_it_copies_what_the_package_is_made_of(name):
    """All that building it reads is there, and .dockerignore lets it through."""
    copied = set()
    for word, rest in instructions(name):
        if word == "COPY":
            *sources, _ = rest.split()
            copied |= {source.rstrip("/") for source in sources}
    assert all((ROOT / source).exists() for source in copied)
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    project = PROJECT["project"]
    needed = {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert copied == needed | set(packages)
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert allowed == copied
