"""What the documents tell people to type works: every command of a ```bash block, every make
target, every link.

A command is FAST (it runs here, as it stands) or TESTED_ELSEWHERE (the file named runs it, perhaps
with smaller numbers). Both kinds are also looked at without running them: `python -m` modules must
exist and answer --help, make targets must exist.
"""

import functools
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
RUN_WHOLE = {
    "data.md": "tests/test_docs_data.py",
    "numerics.md": "tests/test_docs_numerics.py",
    "reliability.md": "tests/test_docs_reliability.py",
}  # documents whose commands are run in order, every one of them

FAST = [
    "make",
    "make help",
    "python -m maxtrain.train --help",
    "python -m maxtrain.train --help optimizer",
    "python -m maxtrain.train --help anomaly",
    "python -m maxtrain.train config=quickstart --print-config",
    "python -m maxtrain.train quickstart --print-config",
]
TESTED_ELSEWHERE = {
    "make quickstart": "tests/test_quickstart.py",
    "make bench": "tests/test_benchmarks.py",
    "python -m data_pipeline.prepare data/stdlib --python-stdlib --tokenizer bpe:4096 --holdout 0.05": (
        "tests/test_quickstart.py"
    ),
    "python -m maxtrain.train config=quickstart": "tests/test_quickstart.py",
    "python -m data_pipeline.prepare data/shakespeare_char --text input.txt --tokenizer chars --holdout 0.1 "
    "--holdout-by tail": "tests/test_train_data.py",
    "python -m maxtrain.train config=shakespeare_char": "tests/test_train_data.py",
    'maxtrain generate runs/quickstart --prompt "def main("': "tests/test_quickstart.py",
    "maxtrain export runs/quickstart exported/quickstart --format hf": "tests/test_quickstart.py",
    "python -m maxtrain.train config=quickstart run_name=wide model.embed_dim=512 optimizer.learning_rate=1e-3": (
        "tests/test_quickstart.py"
    ),
    "python -m maxtrain.train config=quickstart run_name=mixed data.sources.docs.path=data/docs/train "
    "data.sources.docs.weight=0.2": "tests/test_quickstart.py",
    "python -m maxtrain.train config=quickstart run_name=meshed mesh.simulated_devices=4 mesh.fsdp=2 mesh.tensor=2": (
        "tests/test_quickstart.py"
    ),
    "maxtrain replay runs/quickstart --steps 160:200": "tests/test_docs_numerics.py",
    "maxtrain probe config=quickstart": "tests/test_probe.py",
    "maxtrain probe config=llama3_1b --topology v5e:4x4": "tests/test_probe.py",
    "python -m maxtrain.train config=quickstart anomaly.loss_spike=rollback anomaly.grad_spike=skip": "tests/test_anomalies.py",
    "make setup": ".ci/run",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    ".venv/bin/pre-commit install": ".pre-commit-config.yaml",
}

PYTHON = [sys.executable]
PROGRAMS = {
    "python": PYTHON,
    ".venv/bin/python": PYTHON,
    "maxtrain": [*PYTHON, "-m", "maxtrain.cli"],
}


def commands(text: str) -> list[str]:
    """The commands of all ```bash blocks: prompts, comments and blank lines out, lines ending in a
    backslash joined."""
    blocks = re.findall(r"^[ ]*```bash[^\n]*\n(.*?)^[ ]*```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    bare = [re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ") for line in lines]
    return [" ".join(line.split()) for line in bare if line]


COMMANDS = sorted(
    {(path.name, command) for path in DOCUMENTS for command in commands(path.read_text())}
)
MODULES = sorted(
    {match for _, command in COMMANDS for match in re.findall(r"\bpython3? -m ([\w.]+)", command)}
)
TARGETS = sorted(
    {match for _, command in COMMANDS for match in re.findall(r"^make ([a-z][\w-]*)", command)}
)


@functools.cache
def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_commands_are_found_in_blocks():
    text = "```bash\n$ make test  # all\n\npython -m a.b \\\n    x=1#2\n```\ntext\n```python\nno\n```\n  ```bash\n  cd x\n  ```\n"
    assert commands(text) == ["make test", "python -m a.b x=1#2", "cd x"]


def test_the_documents_have_commands():
    assert COMMANDS, (
        "no ```bash block was found in README.md or CONTRIBUTING.md: say there how to start"
    )


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_command_runs_here_or_in_another_test(document, command):
    if document in RUN_WHOLE:
        assert (ROOT / RUN_WHOLE[document]).exists()
    elif command in FAST:
        first, *rest = shlex.split(command)
        result = run(*PROGRAMS.get(first, [first]), *rest)
        assert result.returncode == 0, result.stderr
    else:
        assert command in TESTED_ELSEWHERE, (
            f"{document}: nothing shows that `{command}` works. Add it to FAST in tests/test_docs.py if it takes seconds, "
            f"else to TESTED_ELSEWHERE with the file that runs it."
        )
        where = TESTED_ELSEWHERE[command]
        assert (ROOT / where).exists(), (
            f"`{command}` is said to be tested by {where}, which does not exist: name the file that does"
        )


@pytest.mark.parametrize("module", MODULES)
def test_module_exists_and_answers_help(module):
    assert importlib.util.find_spec(module) is not None, (
        f"`python -m {module}` is in a document, but there is no such module"
    )
    result = run(sys.executable, "-m", module, "--help")
    assert result.returncode == 0 and result.stdout.strip(), (
        f"`python -m {module} --help` must explain itself: {result.stderr}"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_exists_and_is_in_the_help(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
        f"the Makefile has no target {target}"
    )
    assert f"make {target} " in run("make", "help").stdout, (
        f"`make` does not list {target}: give it a `## comment` in the Makefile"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_exist(document):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [
        t for t in targets if not re.match(r"[a-z]+:", t) and not (document.parent / t).exists()
    ]
    assert not missing, f"{document.name} links to files that do not exist: {missing}"
