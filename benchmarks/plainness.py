"""Size and complexity of the code: lines, branches and functions, counted.

    python -m benchmarks.plainness maxtrain data_pipeline
    python -m benchmarks.plainness --at REVISION maxtrain data_pipeline

The second form counts what git has at a revision, so that two tables can be put side by side.
"""

import argparse
import ast
import io
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What makes another way through a function: McCabe's count, as ruff's C901 has it.
_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)
_LONG = 100


class Function(NamedTuple):
    """One function of a file."""

    name: str
    lines: int
    complexity: int


class Counts(NamedTuple):
    """Counts of all files of a folder."""

    lines: int
    characters_a_line: float
    long_lines: float
    tuple_assignments: float
    conditional_expressions: float
    functions: list[Function]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--at", metavar="REVISION", help="count what git has there")
    options = parser.parse_args(argv)
    print(
        "| folder | lines | characters a line | lines over 100 | tuple assignments per 1,000 "
        "| conditional expressions per 1,000 | functions | median lines | longest "
        "| most branches | over 10 branches |"
    )
    print("|---" + "|--:" * 10 + "|")
    for folder in options.folders:
        texts = files_at(options.at, folder) if options.at else files_of(folder)
        print(_row(folder, count(list(texts))))
    return 0


def files_of(folder: str) -> Iterator[str]:
    """The text of each Python file below a folder."""
    for path in sorted(Path(folder).rglob("*.py")):
        yield path.read_text(encoding="utf-8")


def files_at(revision: str, folder: str) -> Iterator[str]:
    """The text of each Python file that git has below a folder at a revision."""
    archive = subprocess.run(
        ["git", "archive", revision, folder], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            file = files.extractfile(member)
            if member.name.endswith(".py") and file is not None:
                yield file.read().decode()


def count(texts: list[str]) -> Counts:
    """Return the counts of some files. Lines of code are those that are no comment and not
    empty.
    """
    lines = 0
    code = 0
    characters = 0
    long_lines = 0
    tuples = 0
    conditionals = 0
    functions: list[Function] = []
    for text in texts:
        rows = text.splitlines()
        lines += len(rows)
        long_lines += sum(len(row) > _LONG for row in rows)
        kept = [row.strip() for row in rows if row.strip() and not row.strip().startswith("#")]
        code += len(kept)
        characters += sum(map(len, kept))
        for node in ast.walk(ast.parse(text)):
            conditionals += isinstance(node, ast.IfExp)
            tuples += _assigns_a_tuple_to_a_tuple(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(_function(node))
    return Counts(
        lines=lines,
        characters_a_line=characters / code,
        long_lines=long_lines / lines,
        tuple_assignments=1_000 * tuples / code,
        conditional_expressions=1_000 * conditionals / code,
        functions=functions,
    )


def _assigns_a_tuple_to_a_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    """Count a function without its docstring."""
    body = node.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        body = body[1:]
    lines = 0
    if body:
        assert node.end_lineno is not None
        lines = node.end_lineno - body[0].lineno + 1
    complexity = 1
    for inner in ast.walk(node):
        complexity += isinstance(inner, _BRANCHES)
        if isinstance(inner, ast.BoolOp):
            complexity += len(inner.values) - 1
    return Function(node.name, lines, complexity)


def _row(folder: str, counts: Counts) -> str:
    longest = max(counts.functions, key=lambda function: function.lines)
    branchiest = max(counts.functions, key=lambda function: function.complexity)
    cells = (
        folder,
        f"{counts.lines:,}",
        f"{counts.characters_a_line:.0f}",
        f"{counts.long_lines:.1%}",
        f"{counts.tuple_assignments:.0f}",
        f"{counts.conditional_expressions:.0f}",
        f"{len(counts.functions):,}",
        f"{statistics.median(function.lines for function in counts.functions):.0f}",
        f"{longest.lines} (`{longest.name}`)",
        f"{branchiest.complexity} (`{branchiest.name}`)",
        f"{sum(function.complexity > 10 for function in counts.functions)}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
