"""`maxtrain checkpoint`: what it says of whole and damaged steps, with which exit code, and what it
copies and removes."""

import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from maxtrain.checkpoint import copying
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.commands.checkpoint import item_bytes, main
from maxtrain.config.schema import CheckpointConfig
from maxtrain.trainer import forks


@pytest.fixture
def run(tmp_path):
    """A run with steps 1 to 6, of which 2 is the best of an evaluation."""
    writer = Checkpoints(
        tmp_path / "run" / "checkpoints", CheckpointConfig(asynchronous=False, keep=9)
    )
    for step in range(1, 7):
        state = {
            "w": jnp.full((4, 8), step, jnp.float32),
            "half": jnp.ones(3, jnp.bfloat16),
            "step": jnp.int32(step),
        }
        writer.save(
            step, state, {"step": step, "best": {"held": {"step": 2, "nll": 1.5}}, "config": "a: 1"}
        )
    writer.close()
    return tmp_path / "run"


def flip(step):
    files = (file for file in step.glob("arrays/**/*") if file.is_file())
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def said(capsys, *argv, code=0):
    assert main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    assert bool(err) == (code != 0)
    return out + err


def steps(folder):
    return [int(path.name) for path in sorted(folder.iterdir()) if path.name.isdecimal()]


def test_list_has_every_step_and_says_which_count(run, capsys):
    folder = run / "checkpoints"
    (folder / "00000003" / "commit.json").unlink()
    (folder / "00000004").rename(folder / "00000004.damaged-20260101-000000-1")
    (folder / "notes.damaged-disk").mkdir()  # not ours
    out = said(capsys, "list", run)
    assert re.search(r"^ +2  \d{4}-\d\d-\d\d .* whole +held *$", out, re.MULTILINE), out
    assert "commit.json is" in out and "put aside" in out and "4 whole of 5" in out
    assert said(capsys, "list", folder) == out


def test_a_run_may_have_a_number_as_its_name(run, capsys):
    out = said(capsys, "list", run)
    assert said(capsys, "list", run.rename(run.with_name("2024"))) == out.replace(
        str(run), str(run.with_name("2024"))
    )


def test_show_has_the_record_and_every_array(run, capsys):
    out = said(capsys, "show", run)
    assert (
        re.search(r"^best held +nll 1.5, step 2 *$", out, re.MULTILINE)
        and "format 4, by maxtrain" in out
    )
    assert "{" not in out and '"' not in out, "no JSON"
    raw = json.loads(said(capsys, "show", run, "--json"))
    assert (
        raw["record"]["best"] == {"held": {"nll": 1.5, "step": 2}}
        and raw["commit"]["format"] == 4
        and raw["path"] in out
    )
    assert re.search(r"w +float32 +4 x 8 +0.000 +\w{16}", out) and re.search(
        r"half +bfloat16 +3 ", out
    )
    assert "3 arrays" in out and "00000006" in out
    assert "00000002" in said(capsys, "show", run, "--step", 2)
    assert "Use one of 1, 2, 3, 4, 5, 6" in said(capsys, "show", run, "--step", 7, code=64)


def test_verify_reads_every_byte_and_names_what_is_damaged(run, capsys):
    out = said(capsys, "verify", run)
    assert out.count("all hashes are those of what was saved") == 6
    file = flip(run / "checkpoints" / "00000004")
    os.truncate(run / "checkpoints" / "00000005" / "record.json", 3)
    out = said(capsys, "verify", run, code=74)
    assert (
        out.count("all hashes") == 4
        and file.name in out
        and "record.json has 3 bytes instead of" in out
    )
    assert "Remove or rename" in out
    assert "all hashes" in said(capsys, "verify", run / "checkpoints" / "00000006")


def test_copy_is_checked_on_both_sides_and_whole(run, capsys, tmp_path, monkeypatch):
    kept = tmp_path / "kept" / "checkpoints"
    other = tmp_path / "other" / "checkpoints"
    said(capsys, "copy", run, kept)
    said(capsys, "copy", run, kept, "--step", 2)
    assert steps(kept) == [2, 6] and not list(kept.glob(".*"))
    target = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    reader = Checkpoints(kept, CheckpointConfig())
    np.testing.assert_array_equal(
        reader.restore(target, 2, partial=True)[0]["w"], np.full((4, 8), 2)
    )
    reader.close()
    assert "Name another directory" in said(capsys, "copy", run, kept, code=64)
    flip(run / "checkpoints" / "00000005")
    assert "crc32" in said(capsys, "copy", run, other, "--step", 5, code=74)
    assert "crc32" in said(capsys, "copy", run, tmp_path / "new", "--step", 5, code=74)
    assert not list(other.iterdir())
    monkeypatch.setattr(copying, "sync", lambda *paths: flip(paths[-1]))
    for place in (other, tmp_path / "new"):
        assert "Check that disk, then copy again" in said(
            capsys, "copy", run, place, "--step", 4, code=74
        )
    assert not list(other.iterdir())
    # A run that was not copied whole has no folder, and nothing hidden is left of it.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "other", "run"]


def test_a_copy_is_a_run_of_its_own_with_the_records_until_its_step(run, capsys, tmp_path):
    """Everything that says whose it is, or where the run is, is that of the copy."""
    config = {"run_name": "run", "output_dir": "s3://bucket/runs", "local_dir": "work", "steps": 9}
    config["checkpoint"] = {"local": "fast", "local_keep": 3, "upload_every": 5, "keep": 7}
    header = '# run: aaaa\n# folder: "elsewhere"\n'
    (run / "config.yaml").write_text(header + yaml.safe_dump(config))
    lines = [{"kind": "run", "step": 0, "run": ""}]
    lines += [{"kind": "train", "step": step, "loss": 1.5} for step in range(1, 7)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "metrics.jsonl").write_text(f"{text}{{torn")
    out = said(capsys, "copy", f"{run}/checkpoints", tmp_path / "new", "--step", 4)
    assert "tokenizer is not copied" in out and "config=" in out
    new = tmp_path / "new"
    identity = json.loads((new / "run.json").read_text())
    assert identity["saved"] == 4 and re.fullmatch("[0-9a-f]{16}", identity["run"])
    assert steps(new / "checkpoints") == [4]
    copied = (new / "config.yaml").read_text()
    assert copied.startswith(f'# run: {identity["run"]}\n# folder: "elsewhere"\n')
    tree = yaml.safe_load(copied)
    assert tree == {
        "run_name": "new",
        "output_dir": str(tmp_path),
        "steps": 9,
        "checkpoint": {"keep": 7},
    }
    ours = [json.loads(line) for line in (new / "metrics.jsonl").read_text().splitlines()]
    assert ours[0]["run"] == identity["run"] and ours[1:] == lines[1:5]
    record = json.loads((new / "checkpoints" / "00000004" / "record.json").read_text())
    assert record["run"] == identity["run"]
    assert record["forked_from"] == [{"run": "", "place": str(run), "step": 4}]
    assert "all hashes" in said(capsys, "verify", new)
    # A copy of the copy, which descends from both, and never over anything.
    said(capsys, "copy", f"{new}/checkpoints/00000004", tmp_path / "third")
    record = json.loads((tmp_path / "third/checkpoints/00000004/record.json").read_text())
    assert [origin["place"] for origin in record["forked_from"]] == [str(run), str(new)]
    before = sorted(path.name for path in tmp_path.rglob("*"))
    said(capsys, "copy", run, new, code=64)
    said(capsys, "copy", run, tmp_path / "a\tb", code=64)
    said(capsys, "copy", run, "s3://bucket/runs/new", code=64)
    # The steps of one run in the folder of another.
    said(capsys, "copy", new, tmp_path / "third" / "checkpoints", code=64)
    (new / "metrics.jsonl").write_text('{"kind": "run", "step": 0, "run": "bbbb"}\n')
    said(capsys, "copy", new, tmp_path / "fourth", code=74)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_training_that_removes_the_step_meanwhile_is_named(run, capsys, tmp_path, monkeypatch):
    def remove(step, *more, **options):
        shutil.rmtree(step)

    monkeypatch.setattr(forks, "copy_frozen", remove)
    out = said(capsys, "copy", run, tmp_path / "new", code=74)
    assert "checkpoint.keep_every" in out and not (tmp_path / "new").exists()


def test_prune_says_first_and_keeps_the_newest_and_the_best(run, capsys):
    out = said(capsys, "prune", run, "--keep", 2, "--keep-every", 3)
    assert (
        "would remove 00000001" in out
        and "2 of 6 whole steps would go. Nothing is removed without --apply." in out
    )
    assert steps(run / "checkpoints") == [1, 2, 3, 4, 5, 6]
    said(capsys, "prune", run, "--keep", 2, "--keep-every", 3, "--apply")
    assert steps(run / "checkpoints") == [2, 3, 5, 6] and not list((run / "checkpoints").glob(".*"))
    flip(run / "checkpoints" / "00000006")
    assert "so nothing is removed" in said(capsys, "prune", run, "--keep", 1, "--apply", code=74)
    assert steps(run / "checkpoints") == [2, 3, 5, 6]
    assert "Use --keep 1 or more" in said(capsys, "prune", run, "--keep", 0, code=64)


def test_prune_frees_what_an_interrupted_one_has_left(run, capsys):
    folder = run / "checkpoints"

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copying.remove_step(folder / "00000001", interrupt)
    # Of a copy that is under way.
    (folder / ".00000009.partial").mkdir()
    out = said(capsys, "prune", run, "--keep", 5)
    assert "would remove .00000001.removed.partial" in out
    assert "0 of 5 whole steps would go. Nothing is removed without --apply." in out
    assert "removes .00000001" in said(capsys, "prune", run, "--keep", 5, "--apply")
    assert steps(folder) == [2, 3, 4, 5, 6]
    assert [path.name for path in folder.glob(".*")] == [".00000009.partial"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prune", "RUN", "--keep", "2", "--app"], "unrecognized arguments: --app"),  # not --apply
        (
            ["prune", "RUN", "--keep-every", "0"],
            "--keep-every=0 must be at least 1. Use --keep-every 1 or more",
        ),
        (["prune", "RUN", "--keep", str(-(10**30))], "must be at least 1. Use --keep 1 or more"),
        (["show", "RUN", "--step", "-1"], "--step=-1 must be at least 0. Use --step 0 or more"),
        (["copy", "RUN", "TO", "--step", "-1"], "--step=-1 must be at least 0"),
        (["show", "RUN", "--step", str(10**30)], "there is no such checkpoint. Use one of 1, 2, 3"),
        (["show", "RUN", "--step", "x"], "invalid int value"),
    ],
)
def test_numbers_that_can_not_be_meant_are_refused(run, capsys, tmp_path, argv, message):
    assert message in said(
        capsys, *[{"RUN": run, "TO": tmp_path / "to"}.get(word, word) for word in argv], code=64
    )
    assert steps(run / "checkpoints") == [1, 2, 3, 4, 5, 6] and not (tmp_path / "to").exists()


def test_a_directory_without_checkpoints_is_refused(tmp_path, capsys):
    assert "Name a run, such as runs/quickstart" in said(capsys, "verify", tmp_path, code=64)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("bool", 1),
        ("float8_e4m3fn", 1),
        ("int64", 8),
        ("key<fry>", 0),
    ],
)
def test_bytes_of_a_number(dtype, size):
    assert item_bytes(dtype) == size


def test_no_jax_is_imported(run):
    program = "import sys; from maxtrain.cli import main; code = main(); assert 'jax' not in sys.modules; sys.exit(code)"
    result = subprocess.run(
        [sys.executable, "-c", program, "checkpoint", "verify", run], capture_output=True, text=True
    )
    assert result.returncode == 0 and "all hashes" in result.stdout, result.stderr
