"""Families by name: the shapes of published models, and names for every dim of every parameter."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from flax import nnx

from data_pipeline.base.errors import ConfigError
from maxtrain.config.load import load_config
from maxtrain.config.problems import problems_of
from maxtrain.config.schema import LatentConfig, ModelConfig, PrecisionConfig, RunConfig
from maxtrain.models.families import FAMILIES, PRESETS
from maxtrain.models.families.family import HfConfig
from maxtrain.models.registry import build_model, logical_axes
from maxtrain.models.specs import head_dim
from maxtrain.parallel.sharding import partition_spec

# Numbers of parameters that the makers' model cards and `safetensors` headers give; a head that is
# the embedding counts once.
SHIPPED = {"llama3_8b": 8_030_261_248, "llama3_1b": 1_235_814_400, "qwen3_0_6b": 596_049_920}
PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "mistral_7b_v0.1": 7_241_732_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mistral_small_24b": 23_572_403_200,
    "qwen2_0.5b": 494_032_768,
    "qwen2_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    # Of the parts for text: with 419_816_304, 421_290_864 and 423_060_336 of what sees pictures,
    # these are 4_300_079_472, 12_187_325_040 and 27_432_406_640.
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "qwen1.5_moe_a2.7b": 14_315_784_192,
    # Added up from the published shapes of its tensors.
    "qwen2_57b_a14b": 57_408_658_944,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_419_200,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}


def num_parameters(model):
    state = nnx.state(nnx.eval_shape(lambda: build_model(model, PrecisionConfig(), 0)))
    return sum(x.size for x in jax.tree.leaves(state))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_shapes_have_the_published_number_of_parameters(name):
    assert num_parameters(load_config([f"config={name}"]).model) == SHIPPED[name]


@pytest.mark.every_dose
@pytest.mark.long
def test_released_models_have_the_published_number_of_parameters():
    assert PRESETS.keys() == PUBLISHED.keys()
    for name, model in PRESETS.items():
        assert num_parameters(model) == PUBLISHED[name], name


@pytest.mark.parametrize("name", PRESETS)
def test_released_models_are_configs_without_problems(name):
    """The config.json of each is read back as the same."""
    model = PRESETS[name]
    assert FAMILIES[model.family].presets[name] is model
    config = dataclasses.replace(RunConfig(), model=model)
    assert not [problem for problem in problems_of(config) if str(problem).startswith("model.")]
    written = FAMILIES[model.family].write(model)
    settings = HfConfig(json.loads(json.dumps(written)), Path("config.json"))
    read = FAMILIES[model.family].read(settings)
    expected = dataclasses.replace(model, head_dim=head_dim(model))
    assert dataclasses.replace(read, family=model.family) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
def test_every_dim_has_a_name_and_all_can_be_split(family, tie):
    config = ModelConfig(
        family=family,
        vocab_size=64,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        mlp_dim=64,
        head_dim=8,
        latent=LatentConfig(16, 16, rope_dim=4, value_dim=8),
        tie_embeddings=tie,
    )
    model = nnx.eval_shape(lambda: build_model(config, PrecisionConfig(), 0))
    state = dict(nnx.to_flat_state(nnx.state(model)))
    assert (("head", "kernel") in state) == (not tie)
    for path, variable in state.items():
        axes = logical_axes(variable)
        assert len(axes) == variable.ndim, path
        assert (axes[0] == "layers") == (path[0] == "layers"), path
        spec = partition_spec(
            axes, {"data": 2, "fsdp": 2, "tensor": 2}, variable.shape, ".".join(path)
        )
        # Along the width: scales of norms are whole, and so are biases of heads and of units.
        width = {"embed", "expert_embed", "latent"}
        assert ("fsdp" in spec) == bool(width & set(axes)), path


def test_a_model_without_a_vocabulary_is_a_problem_of_the_config():
    """This holds for an abstract model, too, where nothing is computed."""
    for build in (build_model, lambda *args: nnx.eval_shape(lambda: build_model(*args))):
        with pytest.raises(ConfigError, match=r"model\.vocab_size=null"):
            build(ModelConfig(), PrecisionConfig())
