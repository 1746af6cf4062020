"""Every command of docs/reliability.md works as it stands, in order."""

import random
import re

import pytest

from tests.support.commands import ROOT, commands, run

TEXT = (ROOT / "docs" / "reliability.md").read_text()


@pytest.mark.long
@pytest.mark.processes
def test_the_commands_work_in_order(tmp_path):
    rng = random.Random(0)
    (tmp_path / "web").mkdir()
    for number in range(100):
        (tmp_path / "web" / f"{number}.txt").write_text(
            " ".join(rng.choices(["if", "then", "else", "page"], k=100))
        )
    (program,) = re.findall(
        r"^```python\n# small\.py\n(.*?)^```",
        (ROOT / "docs" / "data.md").read_text(),
        re.DOTALL | re.M,
    )
    (tmp_path / "small.py").write_text(program)
    outputs = {}
    prepare = "maxtrain prepare data/web --text 'web/*.txt' --tokenizer bytes"
    for command in [prepare, *commands(TEXT)]:
        outputs[command] = run(command, tmp_path, columns=120).all
    (where,) = (out for command, out in outputs.items() if " status runs/first" in command)
    assert (
        "step 12 on record, step 12 saved" in where and "goodput: " in where and "exit 0" in where
    )
    (disturbed,) = (out for command, out in outputs.items() if "FAILPOINT" in command)
    assert "ended with SIGKILL" in disturbed and "Goes on from step 4" in disturbed
    assert any("integrity.repeat_interval" in command for command in outputs)
    listed = list(outputs.values())
    (often,) = (
        out for command, out in outputs.items() if " status file" in command and "often" in command
    )
    assert "file://bucket/runs/often: step 12 on record, step 12 saved" in often
    assert any("step 3, on the disks of the hosts" in out for out in outputs.values())
    (far,) = (
        out for command, out in outputs.items() if " status file" in command and "far" in command
    )
    assert "file://bucket/runs/far: step 8 on record, step 8 saved" in far
    assert any("steps=8" in command and "step 4" in out for command, out in outputs.items())
    assert len(listed) == 31
    assert (
        "3 whole of 3" in listed[2]
        and listed[3].count("all hashes") == 3
        and "params.layers" in listed[4]
    )
    assert listed[6].count("all hashes") == 1 and "Goes on from step 30" in listed[7]
    (branch,) = (out for command, out in outputs.items() if "status runs/branch" in command)
    assert "forked from runs/kept at step 40" in branch
    decays = [out for command, out in outputs.items() if "run_name=decay-" in command]
    assert len(decays) == 2
    for out in decays:
        assert "changed since runs/stable: schedule.name: constant -> wsd" in out
    (started,) = (out for command, out in outputs.items() if "init_from" in command)
    assert re.search(r"00000040: (\d+) of \1 parameters loaded", started)
    (copies,) = (out for command, out in outputs.items() if "verify far/both" in command)
    assert "00000012: all hashes" in copies
    assert sorted(path.name for path in (tmp_path / "runs" / "kept" / "checkpoints").iterdir()) == [
        "00000020",
        "00000030",
        "00000040",
    ]
