"""Models that are none, damaged or do not fit: every command says what is wrong and what to do, before
it computes anything, and leaves nothing behind."""

import json
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxtrain import cli
from tests.support.pretrained import write

TENSOR = "model.layers.0.mlp.down_proj.weight"


def change_tensor(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[TENSOR] = change(tensors[TENSOR])
    save_file(tensors, path, {"format": "pt"})


def with_nan(array):
    array = array.copy()
    array[0, 0] = np.nan
    return array


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def with_more_tokens(folder):
    path = folder / "tokenizer.json"
    record = json.loads(path.read_text())
    for number in range(99, 200):
        record["model"]["vocab"][f"word{number}"] = number
    path.write_text(json.dumps(record))


# A change of a valid directory, and the message about it; by the place of the change.
DAMAGES = {
    "cut": (cut, "model.safetensors: can't be read"),
    "nan": (lambda folder: change_tensor(folder, with_nan), "holds NaN or infinity"),
    "ints": (lambda folder: change_tensor(folder, np.int32), "I32"),
    "wide": (with_more_tokens, "tokenizer"),
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "is missing"),
    "no_tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "no_json": (lambda folder: (folder / "config.json").write_text("{"), "is not a JSON object"),
}
NOWHERE = ("missing", "file", "empty")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name in ("good", *DAMAGES):
        (folder / name).mkdir()
        write(folder / name)
        if name in DAMAGES:
            DAMAGES[name][0](folder / name)
    (folder / "file").write_text("text")
    (folder / "empty").mkdir()
    for name in (*DAMAGES, *NOWHERE):
        models = [{"model": place, "parameters": {"weight": 0.5}} for place in ("good", name)]
        recipe = {"merge_method": "linear", "models": models, "dtype": "float32"}
        (folder / f"{name}.yml").write_text(json.dumps(recipe))
    return folder


COMMANDS = {
    "score": ("PLACE", "--text", "Hello"),
    "evaluate": ("PLACE", "--text", "file"),
    "serve": ("PLACE", "--port", "0"),
    "import": ("PLACE", "out"),
    "merge": ("PLACE.yml", "out"),
    "export": ("PLACE", "out"),
}
OTHERS = [name for name in COMMANDS if name not in ("score", "export")]


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    ["score", "export", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)],
)
def test_what_is_wrong_is_said(command, places, monkeypatch, capsys):
    monkeypatch.chdir(places)
    before = sorted(places.iterdir())
    # The first call imports modules, and finds the devices.
    cli.main([command, *(word.replace("PLACE", "missing") for word in COMMANDS[command])])
    capsys.readouterr()
    for name in (*NOWHERE, *DAMAGES):
        words = [word.replace("PLACE", name) for word in COMMANDS[command]]
        begin = time.process_time()
        code = cli.main([command, *words])
        seconds = time.process_time() - begin
        told = capsys.readouterr().err
        assert code in (64, 65), (name, told)
        assert told.startswith("error: ") and "Traceback" not in told, told
        assert name in told, told
        if name in NOWHERE:
            assert "Name a directory" in told or "Name the directory of a run" in told
            assert seconds < 2, name
        elif command == "export":
            assert "is a Hugging Face directory. Name the directory of a run" in told
        else:
            assert DAMAGES[name][1] in told, told
        assert sorted(places.iterdir()) == before, name


def test_a_recipe_that_is_none_is_named_once(tmp_path, capsys):
    assert cli.main(["merge", str(tmp_path / "missing.yml"), str(tmp_path / "out")]) == 65
    told = capsys.readouterr().err
    assert "can't be read as a recipe (No such file or directory). Name a YAML file" in told
    assert cli.main(["merge", str(tmp_path), str(tmp_path / "out")]) == 65
    assert "can't be read as a recipe (Is a directory)" in capsys.readouterr().err
