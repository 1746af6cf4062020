"""Every block of docs/numerics.md runs as it stands."""

import random
import re

import pytest

from tests.support.commands import ROOT, blocks, commands, run

TEXT = (ROOT / "docs" / "numerics.md").read_text()
WORDS = ["if", "then", "else", "while", "page", "home"]
BLOCKS = re.findall(
    r"^## ([^\n]*)\n((?:(?!^## ).)*?)^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE
)


@pytest.mark.parametrize(("title", "program"), [(title, program) for title, _, program in BLOCKS])
def test_the_example_works(title, program):
    names: dict = {}
    exec(compile(program, f"docs/numerics.md: {title}", "exec"), names)
    assert len(names) > 1, "it did something"


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_work_in_order(tmp_path):
    rng = random.Random(0)
    (tmp_path / "web").mkdir()
    for number in range(100):
        (tmp_path / "web" / f"{number}.txt").write_text(" ".join(rng.choices(WORDS, k=100)))
    (program,) = re.findall(
        r"^```python\n# small\.py\n(.*?)^```",
        (ROOT / "docs" / "data.md").read_text(),
        re.DOTALL | re.M,
    )
    (tmp_path / "small.py").write_text(program)
    outputs = {}
    prepare = "maxtrain prepare data/web --text 'web/*.txt' --tokenizer bytes"
    for command in [prepare, *commands(TEXT)]:
        code = int((re.findall(r"# ends with (\d+)", command) or ["0"])[0])
        outputs[command] = run(command, tmp_path, code=code).all
    same = blocks(TEXT, "text")
    said = outputs["maxtrain replay runs/one --steps 20:40"]
    counts = r"\d+ numbers and \d+ arrays"
    assert re.sub(counts, "", said) == re.sub(counts, "", same[0]) and len(outputs) == 18
    assert (
        "pack(lengths, max_tokens=256)"
        in outputs["maxtrain probe config=small.py --what max_tokens model.max_length=256"]
    )
    other = next(out for command, out in outputs.items() if "40 mesh" in command)
    assert "the launch had devices.count 1, and now it is 2" in other and "likely cause" in other
    (parted,) = (out for command, out in outputs.items() if "compare" in command)
    assert (
        re.search(r"params_hash +4 of 4 +step 10", parted)
        and "config.mesh.simulated_devices: None and 2" in parted
    )
