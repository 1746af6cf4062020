"""Tests in Python: which names of the program they use, and whether they can be judged.

The decision depends on the tests alone, never on the behaviour of a program. Otherwise a failing
program could choose not to be judged.
"""

import ast
import builtins
import re
import symtable
import sys
from typing import NamedTuple

# Modules under which tests import the program.
_PROGRAM_MODULES = ("solution", "main", "program")
# Names that tests use without an import, because programs often import them. The judge uses its
# own, since a program could define an object that equals everything.
_USUAL = {
    "isclose": ("math", "isclose"),
    "Counter": ("collections", "Counter"),
    "OrderedDict": ("collections", "OrderedDict"),
    "defaultdict": ("collections", "defaultdict"),
    "deque": ("collections", "deque"),
    "namedtuple": ("collections", "namedtuple"),
    "Decimal": ("decimal", "Decimal"),
    "Fraction": ("fractions", "Fraction"),
    **{name: ("typing", name) for name in ("Any", "Dict", "List", "Optional", "Set", "Tuple")},
}
_USUAL_MODULES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pytest": "pytest"}
# These would run data of the program as code in the judge, or need the program in the same process
# and folder.
_FORBIDDEN_NAMES = frozenset(
    ("eval", "exec", "compile", "globals", "vars", "locals", "__import__", "open", "input")
)
_FORBIDDEN_MODULES = frozenset(
    [
        *("ctypes", "gc", "importlib", "inspect", "marshal", "mock", "multiprocessing", "pickle"),
        *("runpy", "shelve", "shutil", "socket", "subprocess", "tempfile", "unittest.mock"),
    ]
)
_FORBIDDEN_ATTRIBUTES = frozenset(
    [
        *("redirect_stdout", "redirect_stderr", "_getframe", "settrace", "setprofile", "patch"),
        *("sys.stdout", "sys.stdin", "sys.stderr", "sys.argv", "sys.modules"),
    ]
)
_CLASS = re.compile(r"_*[A-Z]")
_CHECKS = re.compile(r"assert|raises$|fail$")


class UnsupportedTestsError(Exception):
    """The tests cannot be judged from outside of the program."""


class JudgeableTests(NamedTuple):
    """Tests that can be judged.

    Attributes:
        tree: the tests, without imports of the program.
        names: names that the program must define.
        imports: names that the judge defines: a module, and an attribute of it or "".
        check: the name of a function `check(candidate)` that the tests do not call; or None.
    """

    tree: ast.Module
    names: list[str]
    imports: dict[str, tuple[str, str]]
    check: str | None


def read_assertions(source: str, entry_point: str | None) -> JudgeableTests:
    """Return tests that can be judged. Raise an UnsupportedTestsError with the reason if they
    cannot."""
    try:
        tree = ast.parse(source)
        tree = ast.fix_missing_locations(_OwnNames().visit(tree))
        free = _free_names(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsupportedTestsError(f"they are not Python ({error})") from None
    _refuse(tree)
    imports = {}
    for name in sorted(free):
        if name in _USUAL:
            imports[name] = _USUAL[name]
        elif (name in sys.stdlib_module_names or name in _USUAL_MODULES) and _is_module(tree, name):
            imports[name] = (_USUAL_MODULES.get(name, name), "")
    names = sorted(free - set(imports))
    check = _uncalled_check(tree)
    if check is not None:
        if entry_point is None:
            raise UnsupportedTestsError(
                f"they define {check}(candidate) and do not call it. Add a column `entry_point` "
                "with the name of the function, or a line that calls it"
            )
        names = sorted({*names, entry_point})
    if not names:
        raise UnsupportedTestsError("they call nothing that the program defines")
    if not any(map(_is_check, ast.walk(tree))):
        raise UnsupportedTestsError("they check nothing")
    _refuse_objects(tree, set(names))
    return JudgeableTests(tree, names, imports, check)


class _OwnNames(ast.NodeTransformer):
    """Rewrites tests that import the program, so that they use its names directly."""

    def __init__(self) -> None:
        self._modules: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if node.module not in _PROGRAM_MODULES or node.level:
            return node
        renamed = [each for each in node.names if each.asname and each.asname != each.name]
        lines = [ast.parse(f"{each.asname} = {each.name}").body[0] for each in renamed]
        return lines or ast.Pass()  # pyright: ignore

    def visit_Import(self, node: ast.Import) -> ast.AST:
        own = [each for each in node.names if each.name in _PROGRAM_MODULES]
        self._modules |= {each.asname or each.name for each in own}
        node.names = [each for each in node.names if each not in own]
        return node if node.names else ast.Pass()

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        return self.generic_visit(node)


def _free_names(tree: ast.Module) -> set[str]:
    """Return names that are read as globals, and that neither the tests nor Python define."""
    top = symtable.symtable(ast.unparse(tree), "tests", "exec")
    used: set[str] = set()
    bound: set[str] = set()
    tables = [top]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table is top or symbol.is_global()
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
            if table is top and symbol.is_namespace():
                bound.add(symbol.get_name())
    return used - bound - set(dir(builtins)) - {"__name__", "__file__", "__doc__"}


def _is_module(tree: ast.Module, name: str) -> bool:
    """Return whether a name is only used for its attributes."""
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    attributes = sum(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for node in ast.walk(tree)
    )
    return uses == attributes


def _uncalled_check(tree: ast.Module) -> str | None:
    called = _called_names(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and node.name not in called:
            return node.name
    return None


def _called_names(tree: ast.Module) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def functions_to_call(tree: ast.Module) -> list[str]:
    """Return the functions `test_...` that the tests do not call, as pytest would."""
    called = _called_names(tree)
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and node.name not in called
    ]


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return _CHECKS.match(node.func.attr) is not None
    return isinstance(node.func, ast.Name) and _CHECKS.match(node.func.id) is not None


def _refuse(tree: ast.Module) -> None:
    """Raise an UnsupportedTestsError if the tests need the program in their own process."""
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        for name in _imported(node):
            if name in _FORBIDDEN_MODULES or name.split(".")[0] in _FORBIDDEN_MODULES:
                raise UnsupportedTestsError(f"they import {name}")
        if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES:
            raise UnsupportedTestsError(f"they use {node.id}")
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if node.attr in _FORBIDDEN_ATTRIBUTES or text in _FORBIDDEN_ATTRIBUTES:
                raise UnsupportedTestsError(f"they use {text}")
            is_module = isinstance(node.value, ast.Name) and node.value.id in modules
            if is_module and not isinstance(node.ctx, ast.Load):
                raise UnsupportedTestsError(f"they replace {text}")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name not in functions_to_call(tree):
            continue
        if _needs_arguments(node):
            raise UnsupportedTestsError(f"{node.name} needs arguments (fixtures of pytest)")


def _needs_arguments(function: ast.FunctionDef) -> bool:
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args) > len(arguments.defaults)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _refuse_objects(tree: ast.Module, names: set[str]) -> None:
    """Raise an UnsupportedTestsError if the tests compare or calculate with objects of the
    program's classes.

    The class of an object defines equality, so the program would judge itself. Classes are
    recognised by their names, such as `Point`.
    """
    classes = {name for name in names if _CLASS.match(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in names:
                    raise UnsupportedTestsError(f"they derive a class from {base.id}")
    objects: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_object(node.value, classes, objects):
            objects |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    for node in ast.walk(tree):
        for operand in _operands(node):
            if any(_is_object(each, classes, objects) for each in _parts(operand)):
                raise UnsupportedTestsError(
                    f"`{ast.unparse(node)}` compares or calculates with objects of the program"
                )


def _operands(node: ast.AST) -> list[ast.expr]:
    """Return the expressions whose class decides the result of a comparison or calculation."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=right):
            if all(isinstance(op, ast.Is | ast.IsNot) for op in ops):
                return []
            if all(isinstance(op, ast.In | ast.NotIn) for op in ops):
                return [left]
            return [left, *right]
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.AugAssign(target=left, value=right):
            return [left, right]
        case ast.UnaryOp(op=op, operand=operand) if not isinstance(op, ast.Not):
            return [operand]
        case ast.Set(elts=elements):
            return elements
        case ast.Dict(keys=keys):
            return [key for key in keys if key is not None]
    return []


def _parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [part for each in node.elts for part in _parts(each)]
    return [node]


def _is_object(node: ast.AST, classes: set[str], objects: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in objects
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in classes
    if isinstance(node, ast.BinOp):
        return any(_is_object(each, classes, objects) for each in (node.left, node.right))
    return False
