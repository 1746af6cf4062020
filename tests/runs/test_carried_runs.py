"""A run works without its data, from any folder, moved or copied; and goes on from another folder
with the data that it has read."""

import json
import shutil
from pathlib import Path

import pytest

from data_pipeline.prepare.command import main as prepare
from data_pipeline.tokenizer import BESIDE, carry_data
from maxtrain import cli
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.config import load_config
from maxtrain.observe.launches import read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.trainer.loop import main
from maxtrain.trainer.saved_run import load_run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("this_process")]
# As somebody types them beside the data.
PATHS = ["data.sources.text.path=data/train", "eval.sets.held.path=data/eval", "output_dir=runs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_run) -> Path:
    """`runs/whole` of 4 steps and `runs/half` of 2, launched beside the data; config.yaml."""
    folder = tmp_path_factory.mktemp("carried")
    tiny_run(
        folder,
        "--holdout",
        "0.2",
        "--tokenizer",
        "bpe:280",
        steps=4,
        checkpoint_interval=2,
        schedule={"name": "constant", "warmup_steps": 1},
        mesh={"data": 1, "fsdp": 8},
        data={"batch_size": 8},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(folder, "whole") == 0
        assert train(folder, "half", "steps=2") == 0
    return folder


def train(folder, name, *more, paths=PATHS):
    return main(load_config([f"config={folder}/tiny.yaml", f"run_name={name}", *paths, *more]))


def output(capsys, *argv, code=0):
    capsys.readouterr()
    found = cli.main(argv)
    printed = capsys.readouterr()
    assert found == code, printed.err
    return printed


@pytest.fixture(params=["other folder", "copied", "moved"])
def run(folder, tmp_path, monkeypatch, request):
    """The path of a finished run as it is used from a folder without data; where it was moved or
    copied, the data is on another machine."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if request.param == "other folder":
        yield folder / "runs" / "whole"
        return
    elsewhere = tmp_path / "copy"
    shutil.copytree(folder / "runs" / "whole", elsewhere)
    if request.param == "moved":
        shutil.move(elsewhere, here / "it")
        elsewhere = Path("it")
    hidden = folder.with_name(f"{folder.name}-hidden")
    folder.rename(hidden)
    yield elsewhere
    hidden.rename(folder)


@pytest.mark.every_dose
def test_commands_need_no_data(run, folder, tmp_path, capsys):
    is_with_data = folder.exists()
    words = ["--prompt", "the", "--max-tokens", "3", "--temperature", "0"]
    assert output(capsys, "generate", str(run), *words).out
    assert output(capsys, "score", str(run), "--text", "the cat").out
    out = tmp_path / "out"
    output(capsys, "export", str(run), str(out))
    assert (out / "tokenizer.json").read_bytes() == (run / "tokenizer/tokenizer.json").read_bytes()
    output(capsys, "status", str(run))
    output(capsys, "compare", str(run), str(run))
    model, tokenizer = load_run(run)
    assert tokenizer.fits(model.config.vocab_size)
    if is_with_data:
        assert "nats/token" in output(capsys, "evaluate", str(run)).out
        assert "steps" in output(capsys, "plan", str(run)).out
        output(capsys, "plan", str(run), "--step", "2")
    else:
        said = output(capsys, "evaluate", str(run), code=65).err
        assert f"eval.sets.held.path={folder}/data/eval" in said and "--set" in said
        said = output(capsys, "plan", str(run), code=65).err
        assert "data.sources.text.path" in said


def test_the_digest_of_a_checkpoint_and_the_tokenizer_must_fit(folder, tmp_path, capsys):
    shutil.copytree(folder / "runs" / "whole", tmp_path / "run")
    shutil.copytree(folder / "runs" / "whole", tmp_path / "damaged")
    other = tmp_path / "other.txt"
    other.write_text("we know of no cat and of no mat " * 40)
    options = ["--text", str(other), "--tokenizer", "bpe:270", "--workers", "1"]
    assert prepare([str(tmp_path / "data"), *options]) == 0
    carry_data(tmp_path / "run" / "tokenizer", {"a": str(tmp_path / "data")}, BESIDE)
    words = ["--prompt", "the", "--max-tokens", "3"]
    said = output(capsys, "generate", str(tmp_path / "run"), *words, code=65).err
    assert "is not the one that" in said and "trained with" in said
    file = tmp_path / "damaged" / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"the", b"teh"))
    said = output(capsys, "generate", str(tmp_path / "damaged"), *words, code=65).err
    assert "tokenizer.json: expected sha256" in said
    shutil.rmtree(file.parent)
    said = output(capsys, "generate", str(tmp_path / "damaged"), *words, code=65).err
    assert "is missing or incomplete" in said


def copy_half(folder, name):
    shutil.copytree(folder / "runs" / "half", folder / "runs" / name)
    return folder / "runs" / name


def absolute(folder):
    return [*PATHS[:2], f"output_dir={folder}/runs"]


@pytest.mark.every_dose
def test_a_run_goes_on_from_another_folder_with_its_data(folder, tmp_path, monkeypatch, capfd):
    run = copy_half(folder, "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert train(folder, "elsewhere", paths=absolute(folder)) == 0
    assert f"the run goes on with {folder}/data/train" in " ".join(capfd.readouterr().out.split())
    whole = folder / "runs" / "whole"
    assert saved_digests(run / "checkpoints")[4] == saved_digests(whole / "checkpoints")[4]
    last = [record["loss"] for record in read_metrics(run) if record["kind"] == "train"]
    assert last == [record["loss"] for record in read_metrics(whole) if record["kind"] == "train"]
    folders = [launch["folder"] for launch in read_launches(run)]
    assert folders == [str(folder), str(tmp_path)]
    shutil.rmtree(run)


def test_other_data_by_the_same_relative_path_is_named(folder, tmp_path, monkeypatch, capfd):
    run = copy_half(folder, "other-data")
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.txt"
    other.write_text("we know of no cat and of no mat " * 400)
    options = ["--text", str(other), "--tokenizer", str(folder / "data"), "--workers", "1"]
    assert prepare(["data/train", *options]) == 0
    assert train(folder, "other-data", paths=absolute(folder)) == 0
    said = " ".join(capfd.readouterr().out.split())
    known = json.loads((folder / "data/train/manifest.json").read_text())["uid"]
    here = json.loads(Path("data/train/manifest.json").read_text())["uid"]
    assert f"(digest {here})" in said and f"(digest {known})" in said
    whole = folder / "runs" / "whole"
    assert saved_digests(run / "checkpoints")[4] == saved_digests(whole / "checkpoints")[4]
    shutil.rmtree(run)


def test_another_tokenizer_is_refused_by_its_name(folder, tmp_path, capsys):
    run = copy_half(folder, "retokenized")
    options = ["--text", f"{folder}/*.txt", "--tokenizer", "bytes", "--workers", "1"]
    assert prepare([str(tmp_path / "data"), *options]) == 0
    paths = [f"data.sources.text.path={tmp_path}/data", f"output_dir={folder}/runs"]
    for more in ([], ["data.accept_changes=true"]):
        capsys.readouterr()
        assert train(folder, "retokenized", "model.vocab_size=280", *more, paths=paths) == 78
        said = capsys.readouterr().err
        assert "data.sources.text.path" in said and f"--tokenizer {run}/tokenizer" in said
    shutil.rmtree(run)


def test_a_launch_of_a_finished_run_writes_the_tokenizer_again(folder, tmp_path, monkeypatch):
    run = copy_half(folder, "again")
    whole = (run / "tokenizer" / "tokenizer.json").read_bytes()
    shutil.rmtree(run / "tokenizer")
    monkeypatch.chdir(folder)
    assert train(folder, "again", "steps=2") == 0
    assert (run / "tokenizer" / "tokenizer.json").read_bytes() == whole
    shutil.rmtree(run)


def test_config_yaml_of_a_run_is_read_as_where_it_was_started(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = folder / "runs" / "half" / "config.yaml"
    config = load_config([f"config={path}"])
    assert config.data.sources["text"].path == f"{folder}/data/train"
    assert config.eval.sets["held"].path == f"{folder}/data/eval"
    assert config.output_dir == "runs"
    typed = load_config([f"config={path}", "data.sources.text.path=mine"])
    assert typed.data.sources["text"].path == "mine"
    monkeypatch.chdir(folder)
    assert load_config([f"config={path}"]).data.sources["text"].path == "data/train"
