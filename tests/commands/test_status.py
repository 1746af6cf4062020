"""The output of `maxtrain status`."""

import json

from maxtrain.commands import status
from maxtrain.observe.attempts import append_attempt
from maxtrain.observe.launches import append_launch

ATTEMPT = {
    "start": 0.0,
    "from_step": 0,
    "reached_step": 10,
    "saved_step": 4,
    "lost_seconds": 24.0,
    "attempt": 1,
}


def test_where_the_time_went_and_what_the_attempts_ended_with(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    launches = [
        {"start": 100.0, "first": 0, "step": 10, "seconds": {"step": 40.0, "compile": 10.0}},
        {"start": 160.0, "first": 4, "step": 10, "seconds": {"step": 40.0}},
    ]
    (tmp_path / "clock.jsonl").write_text("".join(json.dumps(launch) + "\n" for launch in launches))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 10}\n')
    append_attempt(tmp_path, ATTEMPT | {"reason": "SIGKILL"})
    append_attempt(tmp_path, ATTEMPT | {"reason": "exit 0", "attempt": 2, "lost_seconds": 0.0})
    made_by = {
        "versions": {"jax": "1"},
        "devices": {"kind": "cpu", "count": 1},
        "processes": 1,
        "determinism": "full",
    }
    launch = {
        "time": "noon",
        "command": "a",
        "step": 0,
        "config": "steps: 10\nseed: 1\n",
        **made_by,
    }
    later = {"time": "one", "command": "b", "step": 4, "config": "steps: 12\nseed: 1\n", **made_by}
    for record in (launch, launch | {"step": 2}, later):
        append_launch(tmp_path, record)
    assert status.main([str(tmp_path)], "status") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "step 10 on record, step 0 saved" in said
    assert (
        "56.0 56.0% step: steps that count" in said
        and "24.0 24.0% lost: steps that were made again" in said
    )
    assert (
        "10.0 10.0% down: between launches" in said
        and "goodput: 56.0% of 100.0 s in 2 launches" in said
    )
    assert said.count("changed at") == 1 and said.endswith(
        "changed at step 4, one: config.steps 10 -> 12"
    )
    assert "0 10 4 24 SIGKILL" in said and "0 10 4 0 exit 0" in said


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert status.main([str(tmp_path)], "status") == 64
    assert f"RUN={tmp_path}" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("steps: 8\n")
    assert status.main([str(tmp_path)], "status") == 65
    assert "clock.jsonl" in capsys.readouterr().err


def test_without_a_run_those_there_are_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status.main([], "status") == 65
    assert "runs/ has no runs. Name the folder of one" in capsys.readouterr().err
    for name, start, records in (
        ("older", 100.0, '{"kind": "train", "step": 10, "loss": 2.5}\n'),
        ("newer", 200.0, '{"kind": "eval", "step": 3, "set": "val"}\n'),
        ("broken", 50.0, "x\n"),
    ):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "clock.jsonl").write_text(
            json.dumps({"start": start, "first": 0, "step": 10, "seconds": {}}) + "\n"
        )
        (folder / "metrics.jsonl").write_text(records)
    assert status.main([], "status") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["run", "runs/newer", "runs/older", "runs/broken"]
    assert lines[1][3] == "-" and lines[2][1:4] == ["10", "0", "2.5000"] and lines[3][3] == "?"
