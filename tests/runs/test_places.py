"""Folders that a run is started in or writes to: read-only ones, and those with any letters in their
names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.base.remote import RemotePath
from maxtrain.commands import checkpoint, generate, status
from maxtrain.config import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main

ROOT = Path(__file__).parents[2]
# Spaces, quotes, letters of one byte more and of two, and one that is two characters.
NAME = "Läufe für 'α' – 模型 e\N{COMBINING ACUTE ACCENT}"
# A program that root, too, runs with the rights of files as they are (PR_CAPBSET_DROP of
# CAP_DAC_OVERRIDE); others have no such right that they could lose.
WITHOUT_RIGHTS = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-m", "maxtrain.train", *sys.argv[1:]])
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("output_dir", ["output_dir=runs"]),
        ("local_dir", ["output_dir=file://{folder}/bucket", "local_dir=work"]),
    ],
)
def test_in_a_directory_that_is_read_only_a_run_says_what_to_set(tmp_path, tiny_run, key, words):
    config = tiny_run(tmp_path, steps=2)
    here = tmp_path / "here"
    here.mkdir()
    here.chmod(0o555)
    words = [word.format(folder=tmp_path) for word in words]
    command = [sys.executable, "-c", WITHOUT_RIGHTS, f"config={config}", "run_name=it", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 74, done.stderr
    said = f"/lock: Permission denied. Set {key} to a folder that you may write to."
    assert said in done.stderr and "Traceback" not in done.stderr
    assert list(here.iterdir()) == [] and not (tmp_path / "bucket").exists()


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize("place", ["path", "url"])
def test_a_run_in_a_path_of_any_letters_trains_goes_on_and_is_read(
    tmp_path, tiny_run, request, monkeypatch, capsys, place
):
    folder = tmp_path / NAME
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = tiny_run(folder, checkpoint_interval=2)
    run = f"{folder}/runs/{NAME}"
    words = [f"config={config}", f"run_name={NAME}"]
    if place == "url":
        url = f"{request.getfixturevalue('s3').url}/{NAME}"
        run = f"{url}/{NAME}"
        words += [f"output_dir={url}", f"local_dir={folder / 'work'}"]
    assert main(load_config([*words, "steps=2"])) == 0, capsys.readouterr().err
    assert main(load_config([*words, "steps=4"])) == 0, capsys.readouterr().err
    assert "Goes on from step 2" in capsys.readouterr().out
    assert status.main([run], "status") == 0
    # A long name is written over several lines.
    assert "step 4 on record, step 4 saved" in " ".join(capsys.readouterr().out.split())
    assert checkpoint.main(["verify", run]) == 0
    if place == "path":
        assert generate.main([run, "--prompt", "the", "--max-tokens", "2"]) == 0
        assert [record["step"] for record in read_metrics(Path(run))] == [1, 2, 3, 4]
    else:
        assert (RemotePath(run) / "checkpoints" / "00000004" / "commit.json").exists()
