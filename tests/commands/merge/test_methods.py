"""Methods of merging: their identities, what is random in them, and what mergekit made."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from data_pipeline.base.errors import DataError
from maxtrain.commands.merge import methods
from maxtrain.commands.merge.recipe import METHODS, OF_DIFFERENCES, num_layers, recipe_of
from maxtrain.commands.merge.tensors import draw_of, merged

DATA = Path(__file__).parents[2] / "data"
RECIPES = json.loads((DATA / "merge" / "recipes.json").read_text())["recipes"]


def models():
    """A base and two that differ from it, as those that were given to mergekit."""
    base = load_file(DATA / "parity" / "llama3" / "model.safetensors")
    found = {"base": base}
    for seed, name in enumerate("ab"):
        rng = np.random.default_rng(seed)
        noisy = {}
        for key in sorted(base):
            noisy[key] = base[key] + rng.normal(0, 0.05, base[key].shape).astype(np.float32)
        found[name] = noisy
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_merge_is_what_mergekit_makes(name):
    given_models = models()
    recipe = recipe_of(yaml.safe_load(RECIPES[name]))
    golden = np.load(DATA / "merge" / "golden.npz")
    layers = num_layers(list(given_models["base"]))
    assert layers == 3
    keys = [key for key in golden.files if key.startswith(f"{name}/")]
    assert len(keys) == 3
    for key in keys:
        tensor = key.partition("/")[2]
        arrays = {place: given_models[place][tensor] for place in recipe.places()}
        found = merged(recipe, tensor, arrays, layers)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, golden[key], rtol=0, atol=2e-6)


def arrays_of(seed, shape=(6, 5)):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(3)]


@given(st.integers(0, 2**16), st.sampled_from([(6, 5), (7,), (1, 4), (2, 3, 4)]))
def test_identities(seed, shape):
    base, a, b = arrays_of(seed, shape)
    close = {"rtol": 0, "atol": 1e-6}
    np.testing.assert_array_equal(methods.linear([a, b], [1.0, 0.0]), a)
    np.testing.assert_allclose(methods.linear([a, b], [2.0, 2.0]), (a + b) / 2, **close)
    np.testing.assert_allclose(methods.slerp(a, b, 0.0), a, **close)
    np.testing.assert_allclose(methods.slerp(a, b, 1.0), b, **close)
    np.testing.assert_allclose(methods.slerp(a, a, 0.3), a, **close)
    for flatten in (True, False):
        for row_wise in (True, False):
            first = methods.nuslerp(a, b, [1, 0], None, flatten, row_wise)
            second = methods.nuslerp(a, b, [0, 1], base, flatten, row_wise)
            np.testing.assert_allclose(first, a, **close)
            np.testing.assert_allclose(second, b, **close)
    np.testing.assert_allclose(methods.model_stock(base, [a, a]), a, **close)
    np.testing.assert_array_equal(methods.task_vectors(base, [a - base], [3.0], factor=0.0), base)
    np.testing.assert_allclose(methods.task_vectors(base, [a - base], [1.0]), a, **close)
    np.testing.assert_array_equal(methods.moving_average([a, b], 0.0), b)
    np.testing.assert_array_equal(methods.moving_average([a, b], 1.0), a)
    for how in ("magnitude", "random", "outliers", "della"):
        np.testing.assert_array_equal(methods.sparse(a, how, 1.0), a)


@pytest.mark.parametrize("method", OF_DIFFERENCES)
def test_with_density_1_and_factor_0_a_merge_is_the_base_and_with_1_the_model(method):
    base, a, _ = arrays_of(0)
    for factor, wanted in ((0.0, base), (1.0, a)):
        recipe = recipe_of(
            {
                "merge_method": method,
                "base_model": "base",
                "models": [{"model": "a", "parameters": {"weight": 1.0}}],
                "parameters": {"lambda": factor},
            }
        )
        found = merged(recipe, "x", {"base": base, "a": a}, 0)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_a_moving_average_weighs_the_last_most():
    a, b, c = arrays_of(0)
    found = methods.moving_average([a, b, c], 0.9)
    np.testing.assert_allclose(found, 0.81 * a + 0.09 * b + 0.1 * c, rtol=0, atol=1e-6)


def test_sparse_keeps_the_largest():
    delta = np.array([[3.0, -5.0, 1.0], [0.5, 4.0, -2.0]], np.float32)
    found = methods.sparse(delta, "magnitude", 0.5)
    np.testing.assert_array_equal(found, [[3, -5, 0], [0, 4, 0]])
    found = methods.sparse(delta, "outliers", 0.5, gamma=0.2)
    np.testing.assert_array_equal(found, [[3, 0, 0], [0, 4, -2]])
    found = methods.sparse(delta, "outliers", 0.5, gamma=0.0)
    np.testing.assert_array_equal(found, [[3, -5, 0], [0, 4, 0]])
    with pytest.raises(ValueError, match="keeps none of 6 numbers"):
        methods.sparse(delta, "magnitude", 0.1)


@pytest.mark.parametrize("how", ["random", "della"])
def test_what_is_kept_at_random_has_its_density_and_is_made_up_for(how):
    delta = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)

    def drawn(rescale):
        draw = np.random.default_rng(1)
        return methods.sparse(delta, how, 0.4, epsilon=0.2, rescale=rescale, draw=draw)

    plain = drawn("none")
    kept = plain != 0
    np.testing.assert_allclose(kept.mean(), 0.4, atol=0.01)
    np.testing.assert_array_equal(plain[kept], delta[kept])
    np.testing.assert_allclose(drawn("density"), plain / 0.4, rtol=1e-6)
    np.testing.assert_allclose(np.abs(drawn("l1")).sum(), np.abs(delta).sum(), rtol=1e-5)
    large = np.abs(delta) > 1.5
    if how == "della":
        assert kept[large].mean() > 0.5 and kept[~large].mean() < 0.4
    with pytest.raises(ValueError, match=r"epsilon=0.5 must leave density=0.4"):
        methods.sparse(delta, "della", 0.4, epsilon=0.5, draw=np.random.default_rng(0))


def test_what_is_random_depends_on_seed_tensor_and_model_alone():
    def first(*arguments):
        return draw_of(*arguments).random(4).tolist()

    assert first(0, "x", 0) == first(0, "x", 0)
    assert (
        len({tuple(first(*key)) for key in ((0, "x", 0), (1, "x", 0), (0, "y", 0), (0, "x", 1))})
        == 4
    )
    # For ever: a merge of yesterday is made again.
    np.testing.assert_allclose(first(0, "x", 0)[0], FIRST, rtol=0, atol=1e-15)


FIRST = 0.47402661146089686


def test_numbers_that_can_not_be_merged_name_their_tensor():
    recipe = recipe_of(
        {
            "merge_method": "linear",
            "models": [
                {"model": "a", "parameters": {"weight": 1}},
                {"model": "b", "parameters": {"weight": -1}},
            ],
        }
    )
    _, a, b = arrays_of(0)
    with pytest.raises(DataError, match=r"lm_head: weights \[1, -1\] add up to 0"):
        merged(recipe, "lm_head", {"a": a, "b": b}, 0)
    large = {"a": np.full(3, 3e38, np.float32), "b": np.full(3, -3e38, np.float32)}
    recipe = recipe_of(
        {
            "merge_method": "linear",
            "models": [
                {"model": "a", "parameters": {"weight": 2}},
                {"model": "b", "parameters": {"weight": -2}},
            ],
            "parameters": {"normalize": False},
        }
    )
    with np.errstate(over="ignore"), pytest.raises(DataError, match="lm_head: merging gives NaN"):
        merged(recipe, "lm_head", large, 0)


def test_every_method_has_a_recipe_that_it_is_tested_with():
    tested = {yaml.safe_load(text)["merge_method"] for text in RECIPES.values()}
    assert METHODS.keys() - tested == {
        "soup",
        "ema",
        "dare_linear",
        "dare_ties",
        "della",
        "della_linear",
    }
