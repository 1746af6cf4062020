"""The commands in the documents work: every command of a ```bash block, every make target, every
link.

A command is FAST (it runs here, as it stands) or TESTED_ELSEWHERE (the test named runs it, perhaps
with smaller numbers: every word of it must be there). Both kinds are also looked at without running them: `python -m` modules must
exist and answer --help, make targets must exist.
"""

import ast
import functools
import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.commands import ROOT, commands

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
RUN_WHOLE = {
    "data.md": "tests/docs/test_data.py",
    "fine_tuning.md": "tests/docs/test_fine_tuning.py",
    "numerics.md": "tests/docs/test_numerics.py",
    "reliability.md": "tests/docs/test_reliability.py",
    "posttraining.md": "tests/docs/test_posttraining.py",
}  # documents whose commands are run in order, every one of them

FAST = [
    "make",
    "make help",
    "python -m maxtrain.train --help",
    "python -m maxtrain.train --help optimizer",
    "python -m maxtrain.train --help anomaly",
    "python -m maxtrain.train config=quickstart --print-config",
    "python -m maxtrain.train quickstart --print-config",
    "maxtrain launch slurm --nodes 4 --gpus-per-node 8 --time 1-00 --partition gpu config=llama3_8b data.batch_size=64",
    "maxtrain launch k8s --nodes 4 --gpus-per-node 8 --image registry/maxtrain:gpu --volume runs:/data config=llama3_8b "
    "data.batch_size=64 data.sources.fineweb.path=/data/train eval.sets.fineweb.path=/data/eval output_dir=/data/runs",
    "maxtrain launch k8s --nodes 4 --gpus-per-node 8 --image registry/maxtrain:gpu config=llama3_8b data.batch_size=64 "
    "data.sources.fineweb.path=s3://bucket/train eval.sets.fineweb.path=s3://bucket/eval output_dir=s3://bucket/runs",
    "maxtrain launch gke-tpu --accelerator v5p --topology 4x4x4 --slices 2 --image registry/maxtrain:tpu config=llama3_8b "
    "data.batch_size=128 data.sources.fineweb.path=gs://bucket/train eval.sets.fineweb.path=gs://bucket/eval output_dir=gs://bucket/runs",
]
# The test that runs each of the other commands, perhaps with smaller numbers or another config.
QUICKSTART = "tests/runs/test_quickstart.py::test_quickstart_does_the_whole_job_and_says_so"
VARIANTS = "tests/runs/test_quickstart.py::test_readme_variants_train"
IMPORTED = "tests/commands/test_import_hf.py::test_the_commands_of_the_documents"
CHARACTERS = "tests/runs/test_train_data.py::test_the_character_model_of_the_readme"
EXAMINED = "tests/commands/doctor/test_command.py::test_two_processes_are_examined_as_one_job"
FITTED = "maxtrain fit config=llama3_8b topology="
SERVED = "tests/commands/serve/test_command.py::test_a_run_is_served"
TESTED_ELSEWHERE = {
    "make quickstart": QUICKSTART,
    "python -m maxtrain.train config=quickstart": QUICKSTART,
    "python -m data_pipeline.prepare data/shakespeare_char --text input.txt --tokenizer chars --holdout 0.1 "
    "--holdout-by tail": CHARACTERS,
    "python -m maxtrain.train config=shakespeare_char": CHARACTERS,
    'maxtrain generate runs/quickstart --prompt "def main("': (
        "tests/runs/test_quickstart.py::test_a_finished_run_writes_text"
    ),
    "maxtrain export runs/quickstart exported/quickstart --format hf": (
        "tests/runs/test_quickstart.py::test_a_finished_run_is_exported_as_it_offers"
    ),
    "maxtrain export runs/quickstart quickstart.gguf --format gguf --quant q8_0": (
        "tests/runs/test_quickstart.py::test_a_finished_run_is_a_file_for_llama_cpp"
    ),
    "maxtrain import Llama-3.2-1B runs/llama": IMPORTED,
    "maxtrain evaluate runs/llama --text novel.txt": IMPORTED,
    'maxtrain score runs/llama --text "The cat sat on the mat."': IMPORTED,
    "maxtrain score runs/llama --pairs pairs.jsonl --json": IMPORTED,
    "maxtrain serve runs/llama --port 8000": SERVED,
    "maxtrain serve runs/llama --adapter tuned=adapters/tuned --cache-tokens 65536": SERVED,
    "maxtrain doctor": EXAMINED,
    "maxtrain launch local --processes 2 --job doctor -- --seconds 0.1 --json": EXAMINED,
    "maxtrain launch local --processes 2 config=quickstart run_name=two mesh.simulated_devices=2 mesh.fsdp=4": (
        "tests/runs/test_train.py::test_two_processes_are_as_one"
    ),
    "maxtrain merge recipe.yml merged": "tests/commands/merge/test_command.py::test_the_recipe_of_the_document_is_merged",
    "python -m maxtrain.train config=quickstart run_name=wide model.embed_dim=512 optimizer.learning_rate=1e-3": (
        VARIANTS
    ),
    "python -m maxtrain.train config=quickstart run_name=mixed data.sources.docs.path=data/docs/train "
    "data.sources.docs.weight=0.2": VARIANTS,
    "python -m maxtrain.train config=quickstart run_name=meshed mesh.simulated_devices=4 mesh.fsdp=2 mesh.tensor=2": (
        VARIANTS
    ),
    "python -m maxtrain.train config=quickstart run_name=long mesh.simulated_devices=4 mesh.fsdp=2 mesh.context=2 model.attention=ring": (
        VARIANTS
    ),
    "python -m maxtrain.train config=quickstart run_name=staged mesh.simulated_devices=4 mesh.fsdp=2 "
    "mesh.stage=2 model.pipeline.micro_batches=4": (VARIANTS),
    "python -m maxtrain.train config=quickstart run_name=turns mesh.simulated_devices=4 mesh.fsdp=2 "
    "mesh.stage=2 model.pipeline.schedule=1f1b": (VARIANTS),
    "python -m maxtrain.train config=quickstart run_name=moments optimizer.on_host=true": VARIANTS,
    "python -m maxtrain.train config=quickstart run_name=weights optimizer.on_host=true "
    "train.on_host=all model.remat=full model.scan_layers=true": VARIANTS,
    "python -m maxtrain.train config=quickstart run_name=kept model.remat=named "
    "model.kept.on_device='[attention, gate_up]' model.kept.on_host='[qkv]'": (VARIANTS),
    "python -m maxtrain.train config=quickstart run_name=fitting optimizer.accumulation=auto": VARIANTS,
    "python -m maxtrain.train config=quickstart run_name=experts model.family=mixtral model.moe.num_experts=4 "
    "mesh.simulated_devices=4 mesh.fsdp=2 mesh.expert=2": VARIANTS,
    "maxtrain replay runs/quickstart --steps 160:200": (
        "tests/runs/test_quickstart.py::test_steps_of_a_finished_run_are_the_same_again"
    ),
    FITTED
    + "h100:8 optimizer.accumulation=16": "tests/commands/fit/test_command.py::test_a_step_on_gpus",
    "python -m maxtrain.train config=quickstart run_name=stored mesh.simulated_devices=4 mesh.fsdp=2 mesh.context=2 "
    "model.attention=ring mesh.rules.embed='[fsdp, context]'": VARIANTS,
    FITTED
    + "v5p:4x4x4 --search --tries 12": "tests/commands/fit/test_command.py::test_a_search_on_tpus",
    "maxtrain probe config=quickstart": (
        "tests/commands/probe/test_command.py::test_probing_both_writes_a_picture_and_a_record_and_says_how_to_train"
    ),
}
# What a recipe of the Makefile says, and the test or the check that runs that target.
IN_THE_MAKEFILE = {
    "python -m data_pipeline.prepare data/stdlib --python-stdlib --tokenizer bpe:4096 --holdout 0.05": (
        "quickstart"
    ),
}
CI = re.search(r"^make --keep-going (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
CI_TARGETS = CI[1].split() if CI else []

PYTHON = [sys.executable]
PROGRAMS = {
    "python": PYTHON,
    ".venv/bin/python": PYTHON,
    "maxtrain": [*PYTHON, "-m", "maxtrain.cli"],
}


def without_comment(command: str) -> str:
    """A command without its prompt, its comment and needless spaces."""
    bare = re.sub(r"\s#.*", "", command).removeprefix("$ ")
    return " ".join(bare.split())


COMMANDS = sorted(
    {
        (path.name, without_comment(command))
        for path in DOCUMENTS
        for command in commands(path.read_text())
    }
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
    found = [without_comment(command) for command in commands(text)]
    assert found == ["make test", "python -m a.b x=1#2", "cd x"]


def test_the_documents_have_commands():
    assert COMMANDS, (
        "no ```bash block was found in README.md or CONTRIBUTING.md: say there how to start"
    )


def source_of(test: str) -> str:
    """The text of a test with its decorators, and of what its file has outside of tests."""
    file, name = test.split("::")
    text = (ROOT / file).read_text()
    tree = ast.parse(text)
    others = []
    found = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            others.append(ast.unparse(node))
        elif node.name == name:
            found.append(ast.unparse(node))
    assert found, f"{test} does not exist: name the test that runs the command"
    marks = re.findall(r"pytest\.mark\.(slow|gpu|skip)\b", found[0])
    assert not marks, f"{test} is not run by `make test-all`, since it is marked {marks}"
    return "\n".join([*found, *others])


def pattern_of(word: str) -> str:
    """A pattern of a word of a command in which numbers, and the config, may be other ones."""
    if word.startswith("config="):
        return "config="
    return re.sub(r"\d[\d.]*(e-\d+)?", r"\\d[\\d.]*(e-\\d+)?", re.escape(word).replace("\\.", "."))


def missing_words(command: str, source: str) -> list[str]:
    """The words of a command that are nowhere in the source of the test that is named as running
    it."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        words = words[3:]
    return [word for word in words[1:] if not re.search(pattern_of(word), source)]


def test_a_test_that_runs_something_else_is_seen():
    command = "maxtrain replay runs/one --steps 160:200 mesh.fsdp=2"
    assert (
        missing_words(command, "run('replay', 'runs/one', '--steps', '4:6', 'mesh.fsdp=4')") == []
    )
    assert missing_words(command, "run('replay', 'runs/one', '--steps', '4')") == [
        "160:200",
        "mesh.fsdp=2",
    ]
    with pytest.raises(AssertionError, match="name the test that runs the command"):
        source_of("tests/docs/test_docs.py::test_that_there_is_not")
    with pytest.raises(AssertionError, match="is not run by `make test-all`"):
        source_of(
            "tests/benchmarks/test_chaos.py::test_a_dose_of_what_happens_to_one_of_four_processes"
        )


def test_nothing_is_listed_that_no_document_says():
    said = {command for _, command in COMMANDS}
    assert [c for c in (*TESTED_ELSEWHERE, *IN_THE_MAKEFILE) if c not in said] == []


@pytest.mark.parametrize(("document", "test"), RUN_WHOLE.items())
def test_a_document_that_is_run_whole_is_read_by_its_test(document, test):
    """It finds all blocks, and each command in them is run."""
    source = (ROOT / test).read_text()
    assert f'"docs" / "{document}"' in source and "mark.slow" not in source
    assert re.search(r"for command in .*commands\((TEXT|section)\)", source)
    assert re.search(r"\brun\(command, ", source)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_command_runs_here_or_in_another_test(document, command):
    if document in RUN_WHOLE:
        return  # the test above
    if command in FAST:
        first, *rest = shlex.split(command)
        result = run(*PROGRAMS.get(first, [first]), *rest)
        assert result.returncode == 0, result.stderr
    elif command in TESTED_ELSEWHERE:
        test = TESTED_ELSEWHERE[command]
        missing = missing_words(command, source_of(test))
        assert not missing, f"`{command}` is said to be run by {test}, which has no {missing}"
    elif command in IN_THE_MAKEFILE:
        target = IN_THE_MAKEFILE[command]
        assert command.removeprefix("python ") in recipe(target)
        assert f"make {target}" in TESTED_ELSEWHERE
    elif command == "make bench":
        modules = re.findall(r"-m benchmarks\.(\w+)", recipe("bench"))
        source = (ROOT / "tests" / "benchmarks" / "test_benchmarks.py").read_text()
        assert modules and all(f"{module}.main(" in source for module in modules)
    elif command == "make setup":
        assert "$(READY_DEV)" in recipe("setup"), "it is what the other targets need, too"
    elif command in ("make test", "make test-gpu", "make bench-gpu", "make check-gpu"):
        # These need a GPU, or are what runs this test.
        assert re.search(r"-m pytest|benchmarks", recipe(command.removeprefix("make ")))
    elif command == ".venv/bin/pre-commit install":
        result = run(sys.executable, "-m", "pre_commit", "validate-config")
        assert result.returncode == 0, result.stdout + result.stderr
    else:
        assert command.removeprefix("make ") in CI_TARGETS, (
            f"{document}: nothing shows that `{command}` works. Add it to FAST in tests/docs/test_docs.py if it takes seconds, "
            f"else to TESTED_ELSEWHERE with the test that runs it."
        )


def recipe(target: str) -> str:
    """A target of the Makefile: its line and its commands."""
    found = re.search(rf"^{target}:.*\n(\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, f"the Makefile has no target {target}"
    return found[0]


@pytest.mark.long
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


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a document, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        letters = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(letters.replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_exist(document):
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document
        if name:
            target = document.parent / name
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            missing.append(link)
    assert not missing, f"{document.name} links to what does not exist: {missing}"


@pytest.mark.parametrize(
    "document",
    [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"],
    ids=lambda path: path.name,
)
def test_lines_outside_of_code_are_at_most_100_columns(document):
    prose = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 100] == []
