"""Evaluation sets that come to a run late, evaluation before the first step, and `maxtrain
evaluate`."""

import json
import shutil
from pathlib import Path

import pytest

from data_pipeline.prepare.command import main as prepare
from data_pipeline.tokenizer import ByteTokenizer
from maxtrain.checkpoint.listing import saved_steps
from maxtrain.commands.evaluate import command as evaluate
from maxtrain.config.load import load_config
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer import loop

pytestmark = pytest.mark.usefixtures("this_process")
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    folder = tmp_path_factory.mktemp("sets")
    (folder / "more").mkdir()
    tiny_run(folder / "more", "--holdout", "0.2", texts=30)
    sets = {"val": {"path": str(folder / "data/eval")}}
    options = {
        "steps": STEPS,
        "checkpoint_interval": 2,
        "schedule": {"warmup_steps": 0},
        "eval": {"sets": sets},
    }
    return tiny_run(folder, "--holdout", "0.2", **options)


@pytest.fixture(scope="module")
def finished(config, this_process):
    assert run(config, "finished") == 0
    return config.parent / "runs/finished"


@pytest.fixture
def again(config, finished, capsys):
    """Continue a copy of the finished run. Returns (output, evaluations in their order)."""
    folder = config.parent / "runs/again"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished, folder)

    def go(*overrides):
        capsys.readouterr()
        assert run(config, "again", *overrides) == 0
        said = " ".join(capsys.readouterr().out.split())
        return said, [(r["set"], r["step"]) for r in read_metrics(folder) if r["kind"] == "eval"]

    return go


def run(config, name, *overrides):
    return loop.main(load_config([f"config={config}", f"run_name={name}", *overrides]))


@pytest.mark.long
def test_a_set_that_is_new_to_a_finished_run_is_read_once(config, finished, again):
    other = f"eval.sets.other.path={config.parent}/more/data/eval"
    steps = saved_steps(finished / "checkpoints")
    said, evaluations = again(other)
    assert (
        f"Evaluates other, which step {STEPS}, the run's last, was not evaluated on." in said
        and "lost" not in said
    )
    assert evaluations == [("val", STEPS), ("other", STEPS)]
    assert saved_steps(config.parent / "runs/again/checkpoints").keys() == steps.keys(), (
        "no step is made"
    )
    said, evaluations = again(other)
    assert "Nothing to do" in said and len(evaluations) == 2


@pytest.mark.long
def test_a_set_that_is_another_text_now_is_read_as_that(config, finished, again):
    said, evaluations = again(f"eval.sets.val.path={config.parent}/more/data/eval")
    assert (
        "eval.sets.val was" in said
        and f"Evaluates val, which step {STEPS}" in said
        and "lost" not in said
    )
    assert evaluations == [("val", STEPS)] * 2
    said, _ = again(f"eval.sets.val.path={config.parent}/data/eval")
    first = next(r for r in read_metrics(finished) if r["kind"] == "eval")
    assert f" val {first['nll']:.4f} " in said, "the summary has the text that it is now"
    said, evaluations = again(f"eval.sets.val.path={config.parent}/more/data/eval")
    assert "Nothing to do" in said and len(evaluations) == 2


@pytest.mark.long
def test_evaluation_before_the_first_step(config, capsys):
    assert run(config, "start", "eval_at_start=true", "eval_interval=2") == 0
    records = read_metrics(config.parent / "runs/start")
    assert [(r["kind"], r["step"]) for r in records][:2] == [("eval", 0), ("train", 1)]
    losses = {r["step"]: r["nll"] for r in records if r["kind"] == "eval"}
    assert list(losses) == [0, 2, 4] and losses[0] > losses[4]
    assert run(config, "start", "eval_at_start=true", "eval_interval=2", "steps=6") == 0
    assert [
        r["step"] for r in read_metrics(config.parent / "runs/start") if r["kind"] == "eval"
    ] == [0, 2, 4, 6]


@pytest.mark.long
def test_samples_are_shown_while_it_trains_and_change_nothing(config, finished, capsys):
    options = ["observe.prompts=[the, of]", "observe.sample_interval=2", "init.mup_base_width=16"]
    assert run(config, "samples", *options) == 0
    said = capsys.readouterr().out
    assert (
        "muP: initial weights and learning rates for a width of 16 as chosen at a width of 16"
        in " ".join(said.split())
    )
    lines = [line for line in said.splitlines() if "sample:" in line]
    assert [line.partition("sample:")[0].split() for line in lines] == [
        ["step", f"2/{STEPS}"]
    ] * 2, "the last step has its own"
    assert [line.partition("sample: ")[2][:2] for line in lines] == ["th", "of"]
    losses = [
        [r["loss"] for r in read_metrics(run) if r["kind"] == "train"]
        for run in (finished, finished.parent / "samples")
    ]
    assert losses[0] == losses[1]


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls main in this process, which stays as it is: (exit code, stdout, stderr)."""
    monkeypatch.setattr(evaluate, "start", lambda mesh, cache: None)

    def call(*argv):
        code = evaluate.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return call


@pytest.mark.long
def test_the_command_gives_what_the_run_has_on_record(config, finished, command):
    record = next(r for r in read_metrics(finished) if r["kind"] == "eval")
    code, out, err = command(finished, "--json")
    assert code == 0, err
    (result,) = json.loads(out)["sets"].values()
    assert result["tokens"] == record["tokens"]
    for name in ("nll", "perplexity", "bits_per_byte"):
        assert result[name] == pytest.approx(record[name], rel=1e-6)
    code, out, _ = command(
        finished,
        "--set",
        f"val={config.parent}/data/eval",
        "--set",
        f"more={config.parent}/more/data/eval",
    )
    words = out.split()
    assert code == 0 and f"{finished}, step {STEPS}" in " ".join(words)
    assert f"{record['nll']:.4f}" in words and "more" in words and f"{record['tokens']:,}" in words


@pytest.mark.long
def test_other_rows_steps_and_a_part_of_a_set(finished, command):
    def nll(*argv):
        code, out, err = command(finished, "--json", *argv)
        assert code == 0, err
        return json.loads(out)["sets"]["val"]

    whole, part = nll("--batch-size", 3), nll("--batches", 1)
    assert whole["tokens"] > part["tokens"] and "bits_per_byte" not in part
    assert whole["nll"] == pytest.approx(nll()["nll"], rel=1e-6), "padding has no weight"
    assert nll("--step", 2)["nll"] > whole["nll"]
    assert nll("--seq-length", 16)["nll"] != whole["nll"]


@pytest.mark.long
def test_a_hugging_face_directory(tmp_path, command, capsys):
    source = Path(__file__).parents[1] / "data/parity/llama3"
    shutil.copytree(source, tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("some text " * 40)
    assert (
        prepare([str(tmp_path / "set"), "--text", str(tmp_path / "text.txt"), "--workers", "1"])
        == 0
    )
    code, _, err = command(tmp_path / "hf", "--set", f"val={tmp_path}/set")
    assert code == 65
    assert "its tokenizer has 257 entries, and the model has 160 (model.vocab_size)" in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 64, "either RUN or DIR"),
        (
            ["RUN", "--set", "val"],
            64,
            "--set val: must be NAME=DIR. Write for example --set val=data/stdlib/eval.",
        ),
        (["RUN", "--set", "a=x", "--set", "a=y"], 64, "the name a is given twice"),
        (["RUN", "--batches", "0"], 64, "--batches 0: must be at least 1"),
        (
            ["RUN", "--set", "a=nowhere"],
            65,
            "eval.sets.a.path: nowhere: is not a directory of token shards",
        ),
        (["RUN", "--step", "3"], 74, "Complete steps: 2, 4"),
        (["nowhere"], 64, "nowhere: is not there. Name the directory of a run"),
        (["--hf", "nowhere"], 64, "Name a directory with config.json"),
        (["--hf", "DIR", "--step", "1"], 64, "is a checkpoint of a run, but"),
        (["RUN", "--step", "-1"], 64, "--step -1: must be at least 0"),
        (["RUN", "--dtype", "bfloat16"], 64, "is of Hugging Face directories, and the run"),
    ],
)
def test_what_the_command_refuses(finished, command, argv, code, message):
    parity = Path(__file__).parents[1] / "data/parity/llama3"
    places = {"RUN": finished, "DIR": parity}
    found, _, err = command(*[places.get(argument, argument) for argument in argv])
    assert found == code and message in err


@pytest.mark.long
def test_a_set_of_another_tokenizer_is_refused(finished, tmp_path, command):
    (tmp_path / "text.txt").write_text("some text " * 40)
    assert (
        prepare(
            [
                str(tmp_path / "set"),
                "--text",
                str(tmp_path / "text.txt"),
                "--tokenizer",
                "chars",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    code, _, err = command(finished, "--set", f"val={tmp_path}/set")
    assert code == 78 and "was made with another tokenizer" in err
