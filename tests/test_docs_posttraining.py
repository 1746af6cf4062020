"""Every example of docs/posttraining.md runs as it stands, and its table has all rewards."""

import re
from pathlib import Path

import pytest

from maxtrain.rl.rewards.registry import PROFILES, names_of_ours

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "posttraining.md").read_text()
SECTIONS = re.split(r"^###? ", TEXT, flags=re.MULTILINE)[1:]
EXAMPLES = [
    pytest.param(program, id=section.splitlines()[0])
    for section in SECTIONS
    for program in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("program", EXAMPLES)
def test_the_example_works(program):
    assert "assert" in program, "an example that shows nothing"
    exec(compile(program, "docs/posttraining.md", "exec"), {})


def test_the_table_has_all_rewards():
    listed = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    parts = {f"{profile}.{part}" for profile in PROFILES for part in PROFILES[profile]}
    assert sorted(listed) == sorted(set(names_of_ours()) - parts)
