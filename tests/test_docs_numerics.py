"""Every block of Python in docs/numerics.md runs as it stands."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text()
BLOCKS = re.findall(r"^## ([^\n]*)\n((?:(?!^## ).)*?)^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("title", "program"), [(title, program) for title, _, program in BLOCKS])
def test_the_example_works(title, program):
    names: dict = {}
    exec(compile(program, f"docs/numerics.md: {title}", "exec"), names)
    assert len(names) > 1, "it did something"
