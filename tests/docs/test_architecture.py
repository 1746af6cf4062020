"""Every example of docs/architecture.md runs as it stands, and every file that it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
EXAMPLES = [
    (section.splitlines()[0], program)
    for section in SECTIONS
    for program in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
]


def examples() -> list:
    """All but the longest are run wherever time is short."""
    found = []
    for title, program in EXAMPLES:
        marks = ()
        if title == "Adding a family of models":
            marks = (pytest.mark.long,)
        found.append(pytest.param(title, program, marks=marks, id=title))
    return found


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(("title", "program"), examples())
def test_the_example_works(title, program):
    assert "assert" in program, "an example that shows nothing"
    exec(compile(program, f"docs/architecture.md: {title}", "exec"), {})


def test_there_is_an_example_of_whatever_can_be_added():
    assert len(EXAMPLES) == 9


def test_every_file_that_it_names_is_there():
    named = set(re.findall(r"`((?:maxtrain|data_pipeline|tests)/[\w/]+\.py)`", TEXT))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
