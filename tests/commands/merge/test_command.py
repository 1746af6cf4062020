"""`maxtrain merge`: what it writes, and what it refuses."""

import contextlib
import json
import re
import shutil
import string
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from data_pipeline.tokenizer import ByteTokenizer, CharTokenizer
from maxtrain import cli
from maxtrain.commands.export import command as export
from maxtrain.commands.import_hf import import_weights as import_run
from maxtrain.commands.merge import command as merge
from maxtrain.commands.merge.sources import open_model
from maxtrain.config import load_config
from maxtrain.trainer.loop import main as train
from maxtrain.trainer.saved_run import load_run
from maxtrain.weights.hf import load_pretrained
from tests.support.shared import TINY_MODEL

PARITY = Path(__file__).parents[2] / "data" / "parity"


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Two models beside each other: `a` and `b`, and a function that writes a recipe."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        shutil.copytree(PARITY / "qwen3", name)
        change(name, lambda tensors, seed=seed: noisy(tensors, seed))
    return tmp_path


def noisy(tensors, seed):
    rng = np.random.default_rng(seed)
    for name in sorted(tensors):
        tensors[name] = tensors[name] + rng.normal(0, 0.05, tensors[name].shape).astype(np.float32)


def change(name, how):
    """The tensors of a model, changed in place."""
    path = Path(name) / "model.safetensors"
    tensors = load_file(path)
    how(tensors)
    path.chmod(0o644)
    save_file({key: np.ascontiguousarray(x) for key, x in tensors.items()}, path)


def run(recipe, out="out", *options):
    """Exit code of a merge."""
    Path("recipe.yml").write_text(yaml.safe_dump(recipe))
    return merge.main(["recipe.yml", out, *options])


MEAN = {
    "merge_method": "linear",
    "models": [
        {"model": "a", "parameters": {"weight": 1}},
        {"model": "b", "parameters": {"weight": 3}},
    ],
}


@pytest.mark.every_dose
@pytest.mark.long
def test_a_merged_model_is_read_like_any_other(models, capsys):
    assert run(MEAN) == 0
    said = capsys.readouterr().out
    assert "by linear of a, b; read again: as written" in said
    theirs = [load_file(Path(name) / "model.safetensors") for name in "ab"]
    found = load_file("out/model.safetensors")
    for name, array in found.items():
        wanted = 0.25 * theirs[0][name] + 0.75 * theirs[1][name]
        np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6)
    model, config = load_pretrained("out")
    assert config == load_pretrained("a")[1] and model.config.family == "qwen3"
    told = json.loads(Path("out/merge.json").read_text())
    assert told["recipe"] == Path("recipe.yml").read_text()
    assert told["tensors_sha256"].keys() == {"a", "b"}
    assert len(set(told["tensors_sha256"].values())) == 2
    assert run(MEAN) == 64, "OUT is there"
    assert "is not empty" in capsys.readouterr().err


def test_the_recipe_of_the_document_is_merged(models, capsys):
    document = (Path(__file__).parents[3] / "docs" / "weights.md").read_text()
    (recipe,) = re.findall(r"^```yaml\n# recipe.yml\n(.*?)^```", document, re.DOTALL | re.MULTILINE)
    Path("recipe.yml").write_text(recipe)
    Path("exported").mkdir()
    for name, ours in (("base", PARITY / "qwen3"), ("code", "a"), ("chat", "b")):
        shutil.copytree(ours, f"exported/{name}")
    assert cli.main("merge recipe.yml merged".split()) == 0
    assert "by ties of exported/base, exported/code, exported/chat" in capsys.readouterr().out
    name = "model.embed_tokens.weight"
    base = load_file("exported/base/model.safetensors")[name]
    found = load_file("merged/model.safetensors")[name]
    assert found.dtype == ml_dtypes.bfloat16
    same = found == base.astype(ml_dtypes.bfloat16)
    assert 0.2 < same.mean() < 0.35, "a quarter of the numbers is in neither half that is kept"


def test_numbers_are_rounded_once(models):
    assert run(MEAN | {"dtype": "bfloat16"}, "out", "--max-shard-size", "100KB") == 0
    assert run(MEAN, "exact") == 0
    exact = load_file("exact/model.safetensors")
    files = sorted(Path("out").glob("*.safetensors"))
    assert len(files) == 2
    index = json.loads(Path("out/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == exact.keys()
    for file in files:
        for name, array in load_file(file).items():
            assert array.dtype == ml_dtypes.bfloat16 and index[name] == file.name
            np.testing.assert_array_equal(array, exact[name].astype(ml_dtypes.bfloat16))
    config = json.loads(Path("out/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_what_is_random_is_the_same_every_time_and_another_with_another_seed(models):
    recipe = {
        "merge_method": "dare_ties",
        "base_model": "a",
        "models": [{"model": "b", "parameters": {"weight": 1, "density": 0.5}}],
    }
    assert run(recipe, "one") == run(recipe, "two") == run(recipe, "other", "--seed", "1") == 0
    one, two, other = (
        (Path(name) / "model.safetensors").read_bytes() for name in ("one", "two", "other")
    )
    assert one == two != other


def missing(tensors):
    del tensors["model.norm.weight"]


def wide(tensors):
    name = "model.embed_tokens.weight"
    tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])


def not_a_number(tensors):
    tensors["model.norm.weight"][0] = np.nan


def whole_numbers(tensors):
    tensors["model.norm.weight"] = np.ones(48, np.int32)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (missing, "model.norm.weight: [48] in a, missing in b"),
        (wide, "model.embed_tokens.weight: [160, 48] in a, [161, 48] in b"),
        (not_a_number, "model.norm.weight of b holds NaN or infinity"),
        (whole_numbers, "b: model.norm.weight is of type I32"),
    ],
)
def test_models_that_do_not_fit_are_refused_and_nothing_is_left(models, capsys, how, told):
    change("b", how)
    before = sorted(path.name for path in models.iterdir())
    assert run(MEAN) == 65
    assert told in capsys.readouterr().err
    after = sorted(path.name for path in models.iterdir() if path.name != "recipe.yml")
    assert after == before


def test_a_place_that_is_no_model_is_an_error(models, capsys):
    recipe = {"merge_method": "soup", "models": [{"model": "a"}, {"model": "nowhere"}]}
    assert run(recipe) == 65
    assert "nowhere: is neither a directory with config.json" in capsys.readouterr().err
    Path("a/model.safetensors").write_bytes(b"nonsense")
    assert run(MEAN) == 65
    assert "model.safetensors: can't be read" in capsys.readouterr().err


def test_tokenizers_must_be_the_same_unless_one_is_chosen(models, capsys):
    for name, text in (("a", "one"), ("b", "two")):
        Tokenizer(WordLevel({text: 0, "?": 1}, "?")).save(f"{name}/tokenizer.json")
    assert run(MEAN) == 65
    assert "the models' tokenizers differ (a: " in capsys.readouterr().err
    assert run(MEAN | {"tokenizer_source": "b"}) == 0
    assert Path("out/tokenizer.json").read_bytes() == Path("b/tokenizer.json").read_bytes()


def test_other_settings_of_a_config_are_told(models, capsys):
    path = Path("b/config.json")
    values = json.loads(path.read_text())
    values["rms_norm_eps"] = 0.5
    path.chmod(0o644)
    path.write_text(json.dumps(values))
    assert run(MEAN) == 0
    said = capsys.readouterr().out
    assert "rms_norm_eps is 1e-06 in a, which is taken, and 0.5 in b" in said


def test_a_recipe_with_mistakes_ends_with_78(models, capsys):
    assert run(MEAN | {"merge_method": "magic"}) == 78
    assert "merge_method=magic is unknown" in capsys.readouterr().err


def test_a_part_of_the_layers_is_not_merged_as_if_it_were_all(models, capsys):
    def recipe(layers):
        sources = [{"model": place, "layer_range": layers} for place in "ab"]
        return {"merge_method": "soup", "slices": [{"sources": sources}]}

    for layers in ([0, 2], [1, 3], [0, 4]):
        assert run(recipe(layers)) == 78
        told = capsys.readouterr().err
        assert f"layer_range={layers} must be [0, 3]" in told
        assert "Set layer_range: [0, 3], or leave it out." in told
    assert run(recipe("0-3")) == 78
    assert "must be two numbers of layers" in capsys.readouterr().err
    assert not Path("out").exists()
    assert run(recipe([0, 3])) == 0


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_checkpoints_of_a_run_make_a_soup(tmp_path, tiny_run, monkeypatch):
    config = tiny_run(tmp_path, steps=4, checkpoint_interval=2)
    monkeypatch.chdir(tmp_path)
    assert train(load_config([f"config={config}", "run_name=one"])) == 0
    places = ["runs/one@2", "runs/one@4"]
    assert run({"merge_method": "soup", "models": [{"model": place} for place in places]}) == 0
    assert (
        run(
            {
                "merge_method": "ema",
                "parameters": {"decay": 0.75},
                "models": [{"model": p} for p in places],
            },
            "ema",
        )
        == 0
    )
    first, last = (load_run("runs/one", step)[0].embedding[...] for step in (2, 4))
    soup, _ = load_pretrained("out")
    np.testing.assert_allclose(soup.embedding[...], (first + last) / 2, rtol=0, atol=1e-6)
    average, _ = load_pretrained("ema")
    wanted = 0.75 * first + 0.25 * last
    np.testing.assert_allclose(average.embedding[...], wanted, rtol=0, atol=1e-6)
    assert ByteTokenizer().vocab_size == 257 and Path("out/tokenizer.json").exists()


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
def test_what_adapters_of_a_run_do_is_merged_too(tmp_path, tiny_run, monkeypatch):
    config = tiny_run(
        tmp_path,
        steps=4,
        checkpoint_interval=2,
        optimizer={"learning_rate": 0.05},
        model={**TINY_MODEL, "lora": {"rank": 2}},
    )
    monkeypatch.chdir(tmp_path)
    assert train(load_config([f"config={config}", "run_name=one"])) == 0
    places = ["runs/one@2", "runs/one@4"]
    assert run({"merge_method": "soup", "models": [{"model": place} for place in places]}) == 0
    exports = []
    for step in ("2", "4"):
        assert export.main(["runs/one", step, "--step", step]) == 0
        exports.append(load_file(f"{step}/model.safetensors"))
    first, last = exports
    soup = load_file("out/model.safetensors")
    assert soup.keys() == first.keys()
    for name, array in soup.items():
        wanted = (first[name].astype(np.float32) + last[name].astype(np.float32)) / 2
        np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-6, err_msg=name)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(first[name] - last[name]).max() > 1e-3


@pytest.mark.long
def test_tensors_of_a_run_that_stay_exact_are_written_so(tmp_path):
    """Biases of DeepSeek's routers are float32 in a model of any type."""
    shutil.copytree(PARITY / "deepseek_v3", tmp_path / "source")
    CharTokenizer(string.printable, True).save(tmp_path / "source")
    import_run(tmp_path / "source", tmp_path / "run", "bfloat16")
    with contextlib.ExitStack() as held:
        model = open_model(str(tmp_path / "run"), held)
    kinds = {"float32": [], "bfloat16": []}
    for name, kind in model.dtypes.items():
        kinds[kind].append(name)
    assert kinds["bfloat16"]
    assert kinds["float32"]
    assert all(name.endswith("e_score_correction_bias") for name in kinds["float32"])
