"""Keys that nothing reads: an error where they were typed or are so in the file itself, a note
where an override did that."""

import subprocess
import sys

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.config import RunConfig, from_command_line, load_config, to_yaml
from maxtrain.config.load import load_with_notes

SOURCE = "data: {sources: {a: {path: b}}}\n"


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "c.yaml") -> str:
        (tmp_path / name).write_text(SOURCE + text)
        return f"config={tmp_path}/{name}"

    return write


@pytest.mark.parametrize(
    ("text", "override", "note"),
    [
        (
            "schedule: {min_learning_rate: 2e-4}",
            "schedule.name=constant",
            "schedule.min_learning_rate=0.0002 (not read with schedule.name=constant)",
        ),
        (
            "optimizer: {eps: 1e-6}",
            "optimizer.name=lion",
            "optimizer.eps=1e-06 (not read with optimizer.name=lion)",
        ),
        (
            "checkpoint: {copy_to: d, copy_keep: 2}",
            "checkpoint.copy_to=null",
            "checkpoint.copy_keep=2 (not read with checkpoint.copy_to=null)",
        ),
        (
            "precision: {compute: float16}\nloss_scale: {window: 9}",
            "precision.compute=bfloat16",
            "loss_scale.window=9 (not read with loss_scale.mode=auto with precision.compute=bfloat16)",
        ),
        (
            "anomaly: {max_skipped: 3}",
            "anomaly.non_finite=stop",
            "anomaly.max_skipped=3 (not read with anomaly.non_finite=stop)",
        ),
        (
            "anomaly: {loss_spike: rollback, leave_out: 3}",
            "anomaly.loss_spike=warn",
            "anomaly.leave_out=3 (not read with no policy rollback)",
        ),
        (
            "anomaly: {dead_steps: 3}",
            "anomaly.dead=off",
            "anomaly.dead_steps=3 (not read with anomaly.dead=off)",
        ),
        (
            "init: {name: normal, std: 0.1}",
            "init.name=lecun_normal",
            "init.std=0.1 (not read with init.name=lecun_normal)",
        ),
        (
            "init: {scale: 0.5}",
            "checkpoint.init_from=w",
            "init.scale=0.5 (not read with checkpoint.init_from=w)",
        ),
        (
            "init: {mup_base_width: 64, mup_base_head_dim: 32}",
            "init.mup_base_width=null",
            "init.mup_base_head_dim=32 (not read with init.mup_base_width=null)",
        ),
        (
            "schedule: {name: inverse_sqrt, timescale: 3}",
            "schedule.name=cosine",
            "schedule.timescale=3 (not read with schedule.name=cosine)",
        ),
        (
            "model: {rope_scaling: llama3, rope_factor: 4}",
            "model.rope_scaling=none",
            "model.rope_factor=4.0 (not read with model.rope_scaling=none)",
        ),
        (
            "model: {rope_scaling: yarn, rope: {truncate: false}}",
            "model.rope_scaling=dynamic",
            "model.rope.truncate=false (not read with model.rope_scaling=dynamic)",
        ),
        (
            "precision: {params: bfloat16}\noptimizer: {stochastic_rounding: true}",
            "precision.params=float32",
            "optimizer.stochastic_rounding=true (not read with precision.params=float32)",
        ),
        (
            "mesh: {data: -1, fsdp: 1}\noptimizer: {zero: 1}",
            "mesh.data=1",
            "optimizer.zero=1 (not read with mesh.data=1)",
        ),
        (
            "eval_interval: 5\neval: {sets: {h: {path: c}}}",
            "eval.sets={}",
            "eval_interval=5 (not read with eval.sets={})",
        ),
    ],
    ids=lambda text: text if "=" in text and "(" not in text else "",
)
def test_an_override_that_makes_a_key_of_the_file_idle_is_told_and_the_run_goes_on(
    file, tmp_path, text, override, note
):
    config, notes = load_with_notes([file(text), override])
    assert notes == [f"idle: {note}"]
    key = note.partition("=")[0]
    # The same typed for this run is an error, as ever.
    with pytest.raises(ConfigError) as caught:
        load_config([file(text), override, note.partition(" (")[0]])
    (problem,) = caught.value.problems
    assert problem.startswith(key) and caught.value.exit_code == 78
    # The resolved config is right in itself: a run that goes on from it, or is generated from, is
    # not refused.
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_with_notes([f"config={tmp_path}/resolved.yaml"]) == (config, [])


def test_all_are_said_in_one_line_once(file, capsys):
    reference = file("schedule: {min_learning_rate: 2e-4}\noptimizer: {beta1: 0.8, eps: 1e-6}")
    from_command_line([reference, "schedule.name=constant", "optimizer.name=sgd"], "train")
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(
        "train: idle: optimizer.beta1=0.8 (not read with optimizer.name=sgd), optimizer.eps=1e-06 (not"
    )
    assert "schedule.min_learning_rate=0.0002 (not read with schedule.name=constant)" in said.err
    from_command_line([reference], "train")
    assert capsys.readouterr().err == ""


def test_a_file_that_has_it_so_by_itself_stays_refused(file):
    text = "schedule: {name: constant, min_learning_rate: 2e-4}"
    for overrides in (
        [],
        ["steps=300"],
        ["schedule.name=constant"],
        ["schedule.name=pieces", "schedule.pieces=[{}]"],
    ):
        with pytest.raises(
            ConfigError,
            match=r"schedule.min_learning_rate=0.0002 is for linear.*Set schedule.name=linear",
        ):
            load_config([file(text), *overrides])
    assert load_config([file(text), "schedule.name=linear"]).schedule.min_learning_rate == 2e-4


def test_what_a_file_lacks_without_its_overrides_does_not_matter(tmp_path):
    (tmp_path / "c.yaml").write_text("steps: ten\noptimizer: {eps: 1e-6}\n")
    config = load_config(
        [
            f"config={tmp_path}/c.yaml",
            "steps=10",
            "data.sources.a.path=b",
            "optimizer.name=sgd",
            "schedule.warmup_steps=1",
        ]
    )
    assert config.steps == 10 and config.optimizer.eps == RunConfig().optimizer.eps


def test_a_list_of_pieces_becomes_idle_as_a_whole(file):
    text = "schedule: {name: pieces, pieces: [{name: inverse_sqrt, until: 5}, {power: 3, name: polynomial}], timescale: 4}"
    config, (note,) = load_with_notes([file(text), "schedule.name=cosine"])
    assert config.schedule == RunConfig().schedule
    assert "schedule.pieces=" in note and "schedule.timescale=4" in note
    with pytest.raises(ConfigError, match=r"schedule.pieces\[0\].power=3.0 is for polynomial"):
        load_config(
            [file(text), "schedule.pieces=[{power: 3, name: constant}]", "schedule.timescale=null"]
        )


def test_a_key_inside_a_list_that_was_idle_itself_is_refused(file):
    """An override makes the list be read; what is idle inside it was the file's own."""
    text = "schedule: {name: wsd, warmup_steps: 3, pieces: [{power: 3}]}"
    with pytest.raises(ConfigError, match=r"schedule.pieces\[0\].power=3.0 is for polynomial"):
        load_config([file(text), "schedule.name=pieces"])


def test_the_quickstart_takes_another_schedule_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "maxtrain", "plan", "config=quickstart", "schedule.name=constant", "--print-config"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "name: constant" in done.stdout
    assert done.stderr == "", (
        "its floor is the default, a tenth of the peak, so that nothing of it is left idle"
    )
