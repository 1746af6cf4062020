"""Recipes: what parameters mean for a tensor, and what is refused."""

import pytest

from data_pipeline.base.errors import ConfigError, DataError
from maxtrain.commands.merge.recipe import num_layers, read_recipe, recipe_of

TWO = [{"model": "a", "parameters": {"weight": 0.3}}, {"model": "b"}]


def of(**values):
    return recipe_of({"merge_method": "linear", "models": TWO, **values})


def test_a_parameter_of_a_model_comes_before_that_of_all():
    recipe = of(parameters={"weight": 0.9})
    first, second = recipe.models
    assert recipe.value("weight", "x", 3, first) == 0.3
    assert recipe.value("weight", "x", 3, second) == 0.9
    assert recipe.value("normalize", "x", 3) is True
    with pytest.raises(ConfigError, match="needs weight of model b for x"):
        of().value("weight", "x", 3, second)


def test_lists_are_interpolated_over_layers_and_filters_choose():
    setting = [{"filter": "mlp", "value": [0, 1]}, {"value": [0, 0.5, 1]}]
    recipe = recipe_of(
        {
            "merge_method": "slerp",
            "base_model": "a",
            "models": [{"model": "a"}, {"model": "b"}],
            "parameters": {"t": setting},
        }
    )
    names = [f"model.layers.{i}.mlp.up.weight" for i in range(5)]
    assert num_layers(names) == 5
    assert [recipe.value("t", name, 5) for name in names] == [0, 0.25, 0.5, 0.75, 1]
    names = [f"model.layers.{i}.norm.weight" for i in range(5)]
    assert [recipe.value("t", name, 5) for name in names] == [0, 0.25, 0.5, 0.75, 1]
    assert recipe.value("t", "lm_head.weight", 5) == 0
    assert recipe.value("t", "model.layers.0.norm.weight", 1) == 1


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"merge_method": "magic"}, "merge_method=magic is unknown. Use one of linear"),
        ({"modules": {}}, "modules is not supported in a recipe"),
        ({"models": None}, "must have either models or slices"),
        ({"models": []}, "Name at least one"),
        ({"models": None, "slices": [{}, {}]}, "slices must be one slice of all layers"),
        ({"models": [{"model": "a"}, {"model": "a"}]}, "must have no model twice"),
        ({"merge_method": "ties"}, "merge_method=ties needs a base_model"),
        ({"merge_method": "slerp", "base_model": "c"}, "slerp merges two models, of which one"),
        ({"merge_method": "nuslerp", "base_model": "b"}, "nuslerp merges two models beside"),
        ({"merge_method": "model_stock", "base_model": "a"}, "needs two models or more beside"),
        ({"base_model": "a"}, "merge_method=linear has no base_model"),
        ({"parameters": {"density": 0.5}}, "merge_method=linear has no density"),
        ({"parameters": {"weight": "much"}}, "weight=much must be a number"),
        ({"parameters": {"weight": float("nan")}}, "weight=nan must be a number"),
        ({"parameters": {"normalize": 1}}, "normalize=1 must be true or false"),
        ({"parameters": [1]}, "parameters must be names with values"),
        ({"dtype": "int8"}, "dtype=int8 is not supported"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"merge_method": ["linear"]}, "is unknown. Use one of"),
        ({"base_model": {"path": "x"}}, "must be a directory. Write base_model"),
        ({"models": [{"model": {"path": "x"}}]}, "models must be a list of entries"),
        ({"parameters": {"weight": []}}, "weight=[] has no value"),
        ({"parameters": {"weight": [0.1, "x"]}}, "has values of two kinds"),
        ({"parameters": {"weight": [0.1, {"value": 1}]}}, "has values beside conditions"),
        ({"parameters": {"weight": [{"filter": 3, "value": 1}]}}, "Write the filter as a text"),
        ({"parameters": {"weight": [{"filter": "mlp"}]}}, "must be {filter: PART_OF_A_NAME"),
        ({"parameters": {"weight": [{"value": {"a": 1}}]}}, "must be a value or a list"),
        ({"parameters": {"weight": [{"value": [[1]]}]}}, "must be a value or a list"),
        ({"parameters": {"weight": [{"value": []}]}}, "weight=[] has no value"),
        ({"tokenizer_source": "union"}, "tokenizer_source=union must be base or one"),
        (
            {"merge_method": "dare_ties", "base_model": "a", "parameters": {"rescale": 3}},
            "rescale=3 must be true, false, l1 or density",
        ),
        (
            {"merge_method": "dare_ties", "base_model": "a", "parameters": {"density": 1.5}},
            "density=1.5 must be from 0 to 1",
        ),
    ],
)
def test_a_recipe_that_can_not_be_made_is_refused_with_a_mend(values, told):
    with pytest.raises(ConfigError) as error:
        of(**values)
    assert told in str(error.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        of(seed=-1, dtype="int8", modules={})
    assert str(error.value).count("*") == 3


def test_a_file_that_is_no_recipe_is_an_error(tmp_path):
    with pytest.raises(DataError, match="can't be read as a recipe"):
        read_recipe(tmp_path / "missing.yml")
    aliases = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20)
    )
    bombs = (aliases + "merge_method: *a19", "[" * 100_000, "seed: 1\nseed: 2")
    for content in ("[1, 2]", "a: b: c", "\x00", *bombs):
        (tmp_path / "bad.yml").write_text(content)
        with pytest.raises(DataError):
            read_recipe(tmp_path / "bad.yml")
