"""Random configs train, save, go on and come to the same numbers, or are refused. More:
benchmarks/fuzz_configs.py."""

import random
import re

import pytest

from benchmarks import fuzz_configs
from maxtrain.config import load_config
from maxtrain.config.keys import all_keys
from maxtrain.trainer.loop import main

pytestmark = pytest.mark.usefixtures("this_process")
TRIALS = (
    "test-0",
    "test-1",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("test-2", "test-3")),
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return fuzz_configs.make_scene(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.long
@pytest.mark.parametrize("name", TRIALS)
def test_a_random_config(scene, name, capsys):
    def run(words):
        code = main(load_config(words))
        said = capsys.readouterr()
        return code, said.out + said.err

    overrides = fuzz_configs.draw(random.Random(name), scene.folder)
    fuzz_configs.make_materials(scene, overrides)
    outcome = fuzz_configs.trial(scene.words(name)[:1], scene.runs, name, overrides, run)
    assert outcome.kind != "found", outcome


@pytest.mark.long
def test_bfloat16_activations_train_and_go_on_with_the_same_bits(scene, capsys):
    """The mesh has every axis; there is noise, accumulation and the worst embeddings nearby."""

    def run(words):
        code = main(load_config(words))
        said = capsys.readouterr()
        return code, said.out + said.err

    overrides = [
        "precision.activations=bfloat16",
        "model.remat=dots",
        "model.num_layers=2",
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "model.vocab_size=264",
        "optimizer.accumulation=2",
        "regularization.residual_dropout=0.1",
        "regularization.stochastic_depth=0.2",
        "loss.adversarial=1",
        "init.mup_base_width=8",
    ]
    words = scene.words("rounded")[:1]
    outcome = fuzz_configs.trial(words, scene.runs, "rounded", overrides, run)
    assert outcome.kind == "trained", outcome


def test_every_key_is_drawn_or_named_as_not():
    drawn = {key.path for key in fuzz_configs.drawn_keys()}
    assert len(drawn) > 100
    for key in all_keys():
        path = key.path.replace(".NAME", "").partition("[")[0]
        left_out = (
            fuzz_configs.NOT_DRAWN.fullmatch(key.path)
            or path.endswith("data.sources")
            or path.endswith("eval.sets")
        )
        assert left_out or path in drawn or path.rpartition(".")[0] in drawn, key.path


@pytest.mark.slow
def test_what_is_drawn_is_mostly_accepted_once_the_refused_is_out(scene):
    words = scene.words("x")[:1]
    kept = [
        fuzz_configs.accepted(words, fuzz_configs.draw(random.Random(i), scene.folder))[0]
        for i in range(60)
    ]
    assert sum(overrides is not None for overrides in kept) > 50


def test_a_find_is_told(scene):
    """A traceback, an end by a signal, and a resumed run with other numbers."""
    words = scene.words("x")[:1]
    assert (
        "a traceback"
        in fuzz_configs.trial(
            words, scene.runs, "x", [], lambda _: (70, "Traceback\nKeyError: 3")
        ).words
    )
    assert fuzz_configs.trial(words, scene.runs, "x", [], lambda _: (-6, "")).kind == "found"
    assert (
        fuzz_configs.trial(words, scene.runs, "x", [], lambda _: (78, "error: bad.")).kind
        == "found"
    )
    assert (
        fuzz_configs.trial(words, scene.runs, "x", [], lambda _: (70, "error: bad. Set a=3.")).kind
        == "ended"
    )
    refused = fuzz_configs.trial(
        words, scene.runs, "x", ["mesh.data=0"], lambda _: (78, "error: bad. Set a=3.")
    )
    assert (
        refused.kind == "refused" and refused.refusals == 1 and re.search(r"Set a=3", refused.words)
    )


@pytest.mark.every_dose
@pytest.mark.long
def test_every_objective_and_slice_axis_is_drawn(tmp_path):
    drawn = set()
    for number in range(400):
        drawn.update(fuzz_configs.draw(random.Random(number), tmp_path))
    objectives = {value.partition("=")[2] for value in drawn if value.startswith("objective=")}
    assert objectives == {"distill", "dpo", "grpo", "ppo", "reward"}
    for key in ("mesh.dcn_data", "mesh.dcn_fsdp", "mesh.dcn_stage", "checkpoint.init_from"):
        assert any(value.startswith(f"{key}=") for value in drawn), key
