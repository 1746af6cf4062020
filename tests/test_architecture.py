"""The rules of the house, read from the syntax trees: nothing of the project is imported here,
except in a process of its own.

Each rule is a function from a `Project` to a list of problems, so that the rules themselves are
tested on small made-up projects below. Every problem says where it is, what is wrong and what to
do.
"""

import ast
import dataclasses
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ("data_pipeline", "maxtrain")
LONGEST_LINE = 100
CODE = (*CORE, "configs", "benchmarks")

# Calls that touch a device, the environment, the file system, the terminal or another package's
# settings.
EFFECTS = re.compile(
    r"(print|open|input|sys\.path|signal\.signal|logging\.basicConfig|matplotlib\.(use|pyplot)|(numpy\.)?random\.seed"
    r"|os\.(getenv|putenv|mkdir|makedirs)|warnings\.(filterwarnings|simplefilter)"
    r"|jax\.(devices|local_devices|device_count|local_device_count|process_index|process_count|default_backend|device_put"
    r"|make_mesh|config|distributed|random|numpy))(\.|$)"
)
HARMLESS = {"jax.numpy.dtype", "jax.numpy.finfo", "jax.numpy.iinfo"}
REGISTRATIONS = re.compile(
    r"(.*\.)?(register\w*|add_representer|add_constructor|defvjp|defjvps?|def_partition)"
)

FORBIDDEN_TEXT = {
    r"(?<![\w.~])/(home|root|Users|work)/\w": "an absolute path of one machine: write it relative to the repository, or with ~",
    r"\.\./shared\b": "a path outside the repository: copy what is needed into it",
    r"\b(TODO|FIXME|XXX)\b": "unfinished work: finish it, or describe the limit in the docstring",
    r"^(<{7}|>{7}) ": "a merge conflict: resolve it",
}


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name, absolute and dotted; `from a import b` is a.b, which may be a module or
    something in one."""

    line: int
    name: str
    in_function: bool
    typing_only: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: str
    is_package: bool
    text: str
    tree: ast.Module

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, False, False))

    def _imports(self, node: ast.AST, in_function: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (
                Import(node.lineno, alias.name, in_function, typing_only) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            parent = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
            parts = parent[: len(parent) - node.level + 1] if node.level else []
            base = ".".join([*parts, node.module] if node.module else parts)
            yield from (
                Import(node.lineno, f"{base}.{alias.name}", in_function, typing_only)
                for alias in node.names
            )
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only |= isinstance(node, ast.If) and dotted(node.test, {}).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from self._imports(child, in_function, typing_only)


class Project:
    """The source files below a directory, by dotted name."""

    def __init__(self, root: Path):
        self.root = root
        self.modules = {module.name: module for top in CODE for module in self._read(top)}
        self.tests = [
            (path.relative_to(root).as_posix(), path.read_text())
            for path in sorted(root.glob("tests/**/*.py"))
        ]

    def _read(self, top: str) -> Iterator[Module]:
        for path in sorted(self.root.glob(f"{top}/**/*.py")):
            relative, text = path.relative_to(self.root), path.read_text()
            parts = relative.with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            yield Module(name, relative.as_posix(), is_package, text, ast.parse(text))

    def resolve(self, name: str) -> str | None:
        """The module of ours that an imported name is, or is in; None for other people's."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name or None

    def own_imports(self, module: Module) -> Iterator[tuple[Import, str]]:
        for entry in module.imports:
            target = self.resolve(entry.name)
            if target is not None and target != module.name:
                yield entry, target


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """`np.random.seed` as "numpy.random.seed", given {"np": "numpy"}; empty for anything but names
    and attributes."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def own_imports_in_functions(project: Project) -> list[str]:
    return [
        f"{module.path}:{entry.line} imports {target} inside a function. Move it to the top of the file; "
        f"if that makes a circle, move what both need into a module below."
        for module in project.modules.values()
        if module.path != "maxtrain/cli.py"
        for entry, target in project.own_imports(module)
        if entry.in_function
    ]


# Modules that need an extra as a whole: they are loaded by `load_package` alone.
OF_AN_EXTRA = {
    "maxtrain.commands.serve.app": "serve",
    "maxtrain.commands.serve.connections": "serve",
}


@functools.cache
def owners_of_packages() -> Mapping[str, list[str]]:
    """Distributions by the packages that they install; looking through them takes a second."""
    return packages_distributions()


def undeclared_dependencies(project: Project) -> list[str]:
    """The top of a file imports only the standard library and `dependencies` of pyproject.toml;
    extras belong inside functions, or into modules of OF_AN_EXTRA."""
    table = tomllib.loads((project.root / "pyproject.toml").read_text())["project"]

    def known_with(declared: list[str]) -> set[str]:
        names = {canonical(re.match(r"[\w.-]+", requirement).group()) for requirement in declared}
        provided = {
            top
            for top, owners in owners_of_packages().items()
            if names & {canonical(owner) for owner in owners}
        }
        return {*provided, *sys.stdlib_module_names, *CODE}

    always = known_with(table["dependencies"])
    by_module = {
        name: always | known_with(table["optional-dependencies"][extra])
        for name, extra in OF_AN_EXTRA.items()
        if name in project.modules
    }
    return [
        f"{module.path}:{entry.line} imports {entry.name}, not among `dependencies` of pyproject.toml. Do without, or add it "
        f"with its reason (then `make constraints`). What only an extra brings is imported in the function that uses it."
        for module in project.modules.values()
        if module.name.startswith(CORE)
        for entry in module.imports
        if not entry.in_function
        and entry.name.split(".")[0] not in by_module.get(module.name, always)
    ]


def imports_of_extras(project: Project) -> list[str]:
    return [
        f"{module.path}:{entry.line} imports {target}, which needs an extra as a whole. Load it with load_package."
        for module in project.modules.values()
        for entry, target in project.own_imports(module)
        if target in OF_AN_EXTRA
    ]


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, no `if __name__ ==
    "__main__"`, no annotations."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = [
            *node.decorator_list,
            *node.args.defaults,
            *(d for d in node.args.kw_defaults if d is not None),
        ]
    elif isinstance(node, ast.Lambda):
        children = []
    elif isinstance(node, ast.If) and re.match(
        r"__name__ ==|(typing\.)?TYPE_CHECKING", ast.unparse(node.test)
    ):
        children = node.orelse
    elif isinstance(node, ast.AnnAssign):
        children = [] if node.value is None else [node.value]
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from executed_at_import(child)


def effects_at_import(project: Project) -> list[str]:
    problems = []
    for module in project.modules.values():
        aliases = aliases_of(module)
        for node in executed_at_import(module.tree):
            called = dotted(node.func, aliases) if isinstance(node, ast.Call) else ""
            mentioned = dotted(node, aliases)
            is_bare = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            bare = (
                dotted(node.value.func, aliases) or ast.unparse(node.value.func) if is_bare else ""
            )
            if EFFECTS.match(called) and called not in HARMLESS:
                what = f"calls {called}"
            elif mentioned == "os.environ":
                what = "uses os.environ"
            elif bare and not REGISTRATIONS.fullmatch(bare):
                what = f"calls {bare} for its effect"
            else:
                continue
            problems.append(
                f"{module.path}:{node.lineno} {what} when imported. Importing does nothing: move it into a function."
            )
    return problems


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the annotations of arguments, results, and variables."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            found = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [node.returns]
        yield from (annotation for annotation in found if annotation is not None)


# They read, check and settle the root config; everything else receives its own section.
JOBS = (
    *("maxtrain.config", "maxtrain.trainer", "maxtrain.commands", "maxtrain.cli", "maxtrain.rl"),
)


def root_config_below_the_jobs(project: Project) -> list[str]:
    """A part cannot depend on a config that it does not receive."""
    problems = []
    for module in project.modules.values():
        if not module.name.startswith("maxtrain.") or module.name.startswith(JOBS):
            continue
        for annotation in annotations(module.tree):
            # Those in quotes, too.
            if re.search(r"\bRunConfig\b", ast.unparse(annotation)):
                problems.append(
                    f"{module.path}:{annotation.lineno} takes or gives the root config, which only jobs do. "
                    f"Hand it its own section, or the values that it reads."
                )
    return problems


PRODUCTS = {"contract", "einsum", "matmul", "dot_general", "ragged_dot", "ragged_dot_general"}
PRODUCTS |= {"tensordot", "vdot", "vecdot", "matvec", "vecmat", "inner"}
ARRAYS = ("numpy", "jax.numpy", "jax.lax")


def multiplies(node: ast.AST, aliases: dict[str, str]) -> bool:
    """Return True if a node names a product of matrices, or is one."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    package, _, name = dotted(node, aliases).rpartition(".")
    if package in ARRAYS:
        return name in PRODUCTS or name == "dot"
    return package == "maxtrain.ops.einsum" and name == "contract"


def aliases_of(module: Module) -> dict[str, str]:
    """Return the full names of imported names, such as {"jnp": "jax.numpy"}."""
    aliases = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return aliases


def products_that_are_no_dot(project: Project) -> list[str]:
    """Only files that the docstring of ops/dot.py lists multiply matrices by other means."""
    docstring = ""
    if "maxtrain.ops.dot" in project.modules:
        docstring = ast.get_docstring(project.modules["maxtrain.ops.dot"].tree) or ""
    listed = set(re.findall(r"`(maxtrain/[\w/]+(?:\.py|/))`", docstring))
    unused = set(listed)
    problems = []
    for module in project.modules.values():
        if not module.name.startswith("maxtrain.") or module.name == "maxtrain.ops.dot":
            continue
        aliases = aliases_of(module)
        found = [node for node in ast.walk(module.tree) if multiplies(node, aliases)]
        covering = {entry for entry in listed if module.path.startswith(entry)}
        if found:
            unused -= covering
        if found and not covering:
            problems.append(
                f"{module.path}:{found[0].lineno} multiplies matrices. A product with a weight is a `dot` (ops/dot.py); "
                f"if this can be none, add the file to the list there, with the reason."
            )
    for entry in sorted(unused):
        problems.append(
            f"{entry} multiplies no matrices: remove it from the list in maxtrain/ops/dot.py."
        )
    return problems


def unasserted_tests(project: Project) -> list[str]:
    problems = []
    for path, text in project.tests:
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
                continue
            called = [
                dotted(call.func, {}) for call in ast.walk(node) if isinstance(call, ast.Call)
            ]
            helpers = [
                name for name in called if re.match(r"_?(assert|check)_", name.rpartition(".")[2])
            ]
            checks = {"pytest.raises", "pytest.warns", "pytest.fail"}.intersection(called)
            if not (
                helpers or checks or any(isinstance(child, ast.Assert) for child in ast.walk(node))
            ):
                problems.append(
                    f"{path}:{node.lineno} {node.name} asserts nothing. Use assert, pytest.raises or np.testing.assert_*, or "
                    f"name the helper that asserts assert_* or check_*."
                )
    return problems


# Parsers of text from outside, and the modules that may use them.
PARSERS = {
    "yaml": ({"load", "safe_load", "full_load", "unsafe_load", "load_all", "safe_load_all"}, ()),
    # Messages between processes of one job are no files.
    "json": (
        {"load", "loads", "JSONDecoder"},
        (
            "maxtrain.checkpoint.local",
            "maxtrain.checkpoint.local_writing",
            "maxtrain.checkpoint.manager",
            "maxtrain.checkpoint.writing",
            "maxtrain.observe.watchdog",
            "maxtrain.parallel.agreement",
            "maxtrain.parallel.lobby",
            "maxtrain.parallel.rendezvous",
            "maxtrain.rl.rewards",
        ),
    ),
}


def parsers_without_limits(project: Project) -> list[str]:
    """Only data_pipeline/base/strict_json.py and strict_yaml.py parse text that may be a stranger's."""
    problems = []
    for module in project.modules.values():
        if module.name.startswith("benchmarks"):
            continue
        aliases = aliases_of(module)
        for node in ast.walk(module.tree):
            package, _, name = dotted(node, aliases).rpartition(".")
            names, allowed = PARSERS.get(package, ((), ()))
            strict = f"data_pipeline.base.strict_{package}"
            if name in names and not module.name.startswith((strict, *allowed)):
                problems.append(
                    f"{module.path}:{node.lineno} calls {package}.{name}, which has no limits. Use {strict}."
                )
    return problems


def long_lines(project: Project) -> list[str]:
    """Regular expressions and chat templates that others wrote stay as they are."""
    problems = []
    for module in project.modules.values():
        if not module.name.startswith(CORE):
            continue
        for number, line in enumerate(module.text.splitlines(), 1):
            if len(line) > LONGEST_LINE and not re.search(r"\\p\{L|\{%-", line):
                problems.append(
                    f"{module.path}:{number} has {len(line)} characters. Write at most "
                    f"{LONGEST_LINE}: a name for a part, or a text in two pieces."
                )
    return problems


def forbidden_text(project: Project) -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=project.root, capture_output=True, text=True
    )
    tracked = [project.root / name for name in listing.stdout.split("\0") if name]
    problems = []
    for path in tracked or project.root.rglob("*"):
        if path == Path(__file__) or not path.is_file() or b"\0" in (content := path.read_bytes()):
            continue
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            for pattern, reason in FORBIDDEN_TEXT.items():
                if found := re.search(pattern, line):
                    problems.append(
                        f"{path.relative_to(project.root)}:{number} has {found.group()!r}, {reason}."
                    )
    return problems


RULES = [
    own_imports_in_functions,
    undeclared_dependencies,
    imports_of_extras,
    effects_at_import,
    root_config_below_the_jobs,
    products_that_are_no_dot,
    unasserted_tests,
    parsers_without_limits,
    long_lines,
    forbidden_text,
]


@pytest.fixture(scope="module")
def ours() -> Project:
    return Project(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house(rule, ours):
    problems = rule(ours)
    assert not problems, "\n" + "\n".join(problems)


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a device was touched"
"""


def test_importing_everything_is_silent_and_touches_no_device(ours):
    names = [
        name for name in ours.modules if name.startswith(CORE) and not name.endswith("__main__")
    ]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), result.stderr[-3000:]


# Small projects, each of which breaks a rule in one way: files, and a part of the message.
PYPROJECT = '[project]\ndependencies = ["jax>=0.11", "numpy"]'
BROKEN = [
    (
        own_imports_in_functions,
        {
            "maxtrain/trainer/loop.py": "def f():\n    from data_pipeline.plan import plan",
            "data_pipeline/plan/plan.py": "",
        },
        "Move it to the top",
    ),
    (
        undeclared_dependencies,
        {"maxtrain/ops/a.py": "import pytest", "pyproject.toml": PYPROJECT},
        "or add it with its reason",
    ),
    (
        effects_at_import,
        {"maxtrain/ops/a.py": "import jax\nN = len(jax.devices())"},
        "calls jax.devices",
    ),
    (
        effects_at_import,
        {"maxtrain/ops/a.py": "import jax.numpy as jnp\ndef f(x=jnp.zeros(3)): ..."},
        "calls jax.numpy.zeros",
    ),
    (
        effects_at_import,
        {"maxtrain/trainer/loop.py": "from os import environ\nenviron['A'] = 'b'"},
        "uses os.environ",
    ),
    (
        effects_at_import,
        {"maxtrain/trainer/loop.py": "import logging\nlogging.basicConfig()"},
        "calls logging.basicConfig",
    ),
    (
        effects_at_import,
        {"maxtrain/trainer/loop.py": "def f(): ...\nf()"},
        "move it into a function",
    ),
    (
        root_config_below_the_jobs,
        {"maxtrain/observe/a.py": "def f(config: RunConfig | None): ..."},
        "Hand it its own section",
    ),
    (
        root_config_below_the_jobs,
        {"maxtrain/train_step/a.py": "def f() -> 'schema.RunConfig': ..."},
        "which only jobs do",
    ),
    (
        root_config_below_the_jobs,
        {"maxtrain/models/a.py": "class A:\n    config: RunConfig"},
        "maxtrain/models/a.py:2",
    ),
    (
        products_that_are_no_dot,
        {"maxtrain/models/a.py": "def f(x, w):\n    return x @ w"},
        "A product with a weight is a `dot`",
    ),
    (
        products_that_are_no_dot,
        {
            "maxtrain/models/a.py": "import jax.numpy as np\nf = lambda x, w: np.einsum('i,ij', x, w)"
        },
        "add the file to the list there",
    ),
    (
        products_that_are_no_dot,
        {"maxtrain/models/a.py": "from maxtrain.ops.einsum import contract as c\nf = c"},
        "multiplies matrices",
    ),
    (
        products_that_are_no_dot,
        {"maxtrain/ops/dot.py": '"""* `maxtrain/ops/a.py`: why"""', "maxtrain/ops/a.py": ""},
        "remove it from the list",
    ),
    (
        unasserted_tests,
        {"tests/ops/test_a.py": "def test_it():\n    print(1)"},
        "test_it asserts nothing",
    ),
    (
        parsers_without_limits,
        {
            "maxtrain/commands/merge/command.py": "from yaml import safe_load\nf = lambda text: safe_load(text)"
        },
        "Use data_pipeline.base.strict_yaml",
    ),
    (
        parsers_without_limits,
        {"data_pipeline/a.py": "import json\nf = lambda text: json.loads(text)"},
        "Use data_pipeline.base.strict_json",
    ),
    (long_lines, {"maxtrain/ops/a.py": f"A = '{'a' * 100}'"}, "has 106 characters"),
    (forbidden_text, {"docs/a.md": "cd /ho" + "me/me/maxtrain"}, "relative to the repository"),
    (forbidden_text, {"a.toml": "<<<<" + "<<< HEAD"}, "resolve it"),
]
SOUND = {
    "data_pipeline/plan/plan.py": "import numpy as np\nA = np.zeros(3)",
    "maxtrain/__init__.py": '__version__ = "0"',
    "maxtrain/config/load.py": "import os\nfrom data_pipeline import plan\n\ndef home():\n    return os.environ['HOME']",
    "maxtrain/ops/norm.py": (
        "import jax\nimport jax.numpy as jnp\n"
        "@jax.custom_vjp\ndef f(x): ...\nf.defvjp(f, f)\nSMALLEST = jnp.finfo(jnp.float32).min"
    ),
    "maxtrain/models/llama.py": "from ..ops.norm import f\nfrom maxtrain.config import load",
    "maxtrain/trainer/loop.py": (
        "import maxtrain.weights.hf\nfrom maxtrain import __version__\nif __name__ == '__main__':\n    print(__version__)"
    ),
    "maxtrain/weights/hf.py": "from typing import TYPE_CHECKING",
    "maxtrain/config/help.py": "def describe(config: RunConfig): ...",
    "maxtrain/ops/dot.py": '"""* `maxtrain/ops/einsum.py`: why"""',
    "maxtrain/ops/einsum.py": "import jax.numpy as jnp\nf = jnp.einsum",
    "maxtrain/models/mlp.py": "from maxtrain.ops.dot import dot\nf = dot",
    "maxtrain/trainer/job.py": "def open_job(config: RunConfig): ...",
    "maxtrain/cli.py": "def main():\n    from maxtrain import train",
    "benchmarks/data.py": "from data_pipeline.plan.plan import A",
    "tests/ops/test_norm.py": "def test_a():\n    np.testing.assert_allclose(1, 1)\ndef test_b():\n    check_same(1)",
    "pyproject.toml": PYPROJECT,
    "README.md": "python -m maxtrain.train output_dir=~/runs  # see ./configs/home/a.py",
}


def write(root: Path, files: dict[str, str]) -> Project:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Project(root)


@pytest.mark.parametrize(("rule", "files", "expected"), BROKEN)
def test_a_broken_rule_is_found_and_its_mend_named(rule, files, expected, tmp_path):
    problems = rule(write(tmp_path, files))
    assert len(problems) >= 1 and all(expected in problem for problem in problems), problems


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_project_passes(rule, tmp_path):
    assert rule(write(tmp_path, SOUND)) == []
