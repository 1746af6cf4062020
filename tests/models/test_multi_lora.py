"""Several adapters beside each other: a row is as in a model that has its adapters alone."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from data_pipeline.base.errors import ConfigError, DataError, UsageError
from maxtrain.config.schema import (
    LatentConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PrecisionConfig,
    RoutingConfig,
)
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.models.adapt import split_adapters
from maxtrain.models.lora_bank import num_sets, with_chosen
from maxtrain.models.multi_lora import AdapterSet, with_banks
from maxtrain.models.registry import build_model
from maxtrain.models.unstack import unstacked
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.trainable import join
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.peft import read_set, write_adapters
from tests.support.commands import ROOT, blocks

PARITY = ROOT / "tests" / "data" / "parity"
EXACT = PrecisionConfig(compute="float32")
BASE = ModelConfig(
    vocab_size=64,
    num_layers=3,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    max_length=64,
)
# Of other ranks, scalings and products; the last one with magnitudes.
LORAS = (
    LoraConfig(rank=3, alpha=6.0),
    LoraConfig(rank=8, alpha=4.0, scaling="root", targets=(r"attention\.(q|v)",)),
    LoraConfig(rank=2, alpha=8.0, targets=(r"mlp\.",), magnitudes=True),
)
GREEDY = Sampling(temperature=0.0)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, 64, length).tolist() for length in (5, 17, 33, 9)]


@functools.cache
def base():
    return jax.jit(lambda: build_model(BASE, EXACT, 0))()


@functools.cache
def adapted(number):
    return with_adapters(dataclasses.replace(BASE, lora=LORAS[number]), number)


def with_adapters(config, seed):
    """A model with adapters that are not those they begin as."""
    model = jax.jit(lambda: build_model(config, EXACT, 0))()
    graphdef, variables = nnx.split(model)
    others, adapters = split_adapters(variables)
    rng = np.random.default_rng(seed)

    def changed(x):
        return x + np.asarray(rng.normal(size=x.shape), np.float32) * 0.3

    return nnx.merge(graphdef, join(others, jax.tree.map(changed, adapters)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The adapters in PEFT's files."""
    found = []
    for number in range(len(LORAS)):
        folder = tmp_path_factory.mktemp(f"adapters-{number}")
        model = adapted(number)
        _, adapters = split_adapters(nnx.state(model))
        write_adapters(folder, adapters, model.config, None)
        found.append(folder)
    return found


def side_by_side(folders, model):
    return with_banks(model, [read_set(f, f.name, model.config) for f in folders])


def alone(model, prompt, row):
    engine = Engine(model, slots=1, chunk=4, piece=16)
    text = engine.submit(prompt, 12, GREEDY, row=row)
    engine.run()
    return text


@pytest.mark.long
@pytest.mark.parametrize("is_stacked", [False, True])
def test_each_row_is_as_with_its_adapters_alone(folders, is_stacked):
    """One batch has rows without adapters and rows with each set of them."""
    model = base()
    if not is_stacked:
        model = unstacked(jax.jit(lambda: build_model(BASE, EXACT, 0))())
    models = [base(), *map(adapted, range(len(LORAS)))]
    expected = [alone(models[i], prompt, i) for i, prompt in enumerate(PROMPTS)]
    assert len({tuple(alone(one, PROMPTS[0], 0).ids) for one in models}) == 4
    engine = Engine(side_by_side(folders, model), slots=3, chunk=4, piece=16)
    assert engine.num_sets == 3
    texts = []
    for number, prompt in enumerate(PROMPTS):
        texts.append(engine.submit(prompt, 12, GREEDY, row=number, adapter=number))
    engine.run()
    for text, other in zip(texts, expected, strict=True):
        assert text.ids == other.ids
        np.testing.assert_allclose(text.logprobs, other.logprobs, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("cache_tokens", [None, 512])
def test_texts_share_only_what_was_read_with_the_same_adapters(folders, cache_tokens):
    engine = Engine(
        side_by_side(folders, base()), slots=2, chunk=4, piece=16, cache_tokens=cache_tokens
    )
    texts = []
    for number in (0, 1, 0, 1, 2):
        texts.append(engine.submit(PROMPTS[2], 8, GREEDY, adapter=number))
    engine.run()
    models = [base(), adapted(0), adapted(1)]
    of_each = [alone(model, PROMPTS[2], 0).ids[:8] for model in models]
    assert [text.ids for text in texts] == [of_each[i] for i in (0, 1, 0, 1, 2)]


@pytest.mark.every_dose
@pytest.mark.long
def test_without_rows_named_it_is_the_model_itself(folders):
    tokens = jnp.array([PROMPTS[1]], jnp.int32)
    model = side_by_side(folders, base())
    np.testing.assert_array_equal(model(tokens), base()(tokens))


@pytest.mark.long
@pytest.mark.every_dose
def test_what_was_read_is_what_was_written(folders):
    found = read_set(folders[1], "one", BASE)
    assert found.lora.targets == (
        r"^layers\.0\.attention\.q$",
        r"^layers\.0\.attention\.v$",
    )
    assert dataclasses.replace(found.lora, targets=LORAS[1].targets) == LORAS[1]
    assert len(found.arrays) == 4


@pytest.mark.long
def test_numbers_of_adapters_that_are_not_there_are_refused(folders):
    engine = Engine(side_by_side(folders[:1], base()), slots=1)
    with pytest.raises(UsageError, match=r"adapter=2 must be 0 .* the 1 sets"):
        engine.submit([1], 2, GREEDY, adapter=2)
    with pytest.raises(UsageError, match=r"adapter=1 must be 0 .* the 0 sets"):
        Engine(base(), slots=1).submit([1], 2, GREEDY, adapter=1)


@pytest.mark.every_dose
@pytest.mark.long
def test_a_model_with_adapters_of_its_own_gets_no_others(folders):
    with pytest.raises(UsageError, match=r"adapters of its own \(model\.lora\.rank=3\)"):
        side_by_side(folders, adapted(0))


@pytest.mark.long
def test_an_output_without_weights_stays_without(folders):
    """Padded units of released models have none."""
    graphdef, variables = nnx.split(jax.jit(lambda: build_model(BASE, EXACT, 0))())
    flat = dict(nnx.to_flat_state(variables))
    path = ("layers", "0", "mlp", "up", "kernel")
    flat[path] = flat[path].replace(flat[path].get_value().at[..., 3].set(0))
    found = read_set(folders[2], "one", BASE)
    arrays = dict(found.arrays)
    name = "layers.0.mlp.up.adapter.b"
    arrays[name] = arrays[name].copy()
    arrays[name][..., 3] = 0
    base_of = nnx.merge(graphdef, nnx.from_flat_state(flat))
    engine = Engine(with_banks(base_of, [found._replace(arrays=arrays)]), slots=1)
    text = engine.submit([1, 2, 3], 4, GREEDY, adapter=1)
    engine.run()
    assert text.reason == "length"


EXPERTS = dataclasses.replace(
    BASE, family="mixtral", num_layers=2, moe=MoeConfig(num_experts=4, experts_per_token=2)
)
# Of all products of experts, and of some beside others.
EXPERT_LORAS = (
    LoraConfig(rank=3, alpha=6.0, targets=(r"mlp\.(gate|up|down)",)),
    LoraConfig(rank=2, alpha=8.0, scaling="root", targets=(r"attention\.q", r"mlp\.down")),
    LoraConfig(rank=4, alpha=4.0, targets=(r"mlp\.(gate|up)",)),
)


@functools.cache
def with_experts(number):
    """A model with experts: 0, or with adapters."""
    if number == 0:
        return jax.jit(lambda: build_model(EXPERTS, EXACT, 0))()
    return with_adapters(dataclasses.replace(EXPERTS, lora=EXPERT_LORAS[number - 1]), number)


@functools.cache
def sets_of_experts():
    sets = []
    for number, lora in enumerate(EXPERT_LORAS, 1):
        _, adapters = split_adapters(nnx.state(with_experts(number)))
        arrays = {path: np.asarray(leaf[...]) for path, leaf in paths(adapters).items()}
        sets.append(AdapterSet(f"set {number}", lora, arrays))
    return sets


@functools.cache
def logits_of_experts():
    """Return the logits of four rows, each by a model of its own, with the rows' tokens."""
    tokens = np.random.default_rng(1).integers(1, 64, (4, 24)).astype(np.int32)
    rows = []
    for number, row in enumerate(tokens):
        rows.append(np.asarray(jax.jit(with_experts(number).__call__)(row[None])))
    return tokens, np.concatenate(rows)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": "blocks"},
        pytest.param({"kernel": "eager"}, marks=pytest.mark.long),
        pytest.param({"kernel": "ragged"}, marks=pytest.mark.long),
        # With room for all.
        pytest.param({"capacity_factor": 2.0}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_tokens_of_experts_have_the_adapters_of_their_row(changes):
    tokens, expected = logits_of_experts()
    config = dataclasses.replace(EXPERTS, routing=RoutingConfig(**changes))
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: build_model(config, EXACT, 0)))
    base_of = nnx.merge(graphdef, nnx.state(with_experts(0)))
    graphdef, variables = nnx.split(with_banks(base_of, sets_of_experts()))
    assert num_sets(variables) == 3

    @jax.jit
    def logits(numbers):
        return nnx.merge(graphdef, with_chosen(variables, numbers))(jnp.asarray(tokens))

    found = logits(jnp.arange(4))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert abs(expected - np.asarray(logits(jnp.zeros(4, jnp.int32)))).max() > 0.01
    # The order of rows says nothing.
    others = logits(jnp.array([0, 2, 1, 3]))
    np.testing.assert_allclose(others[np.array([0, 3])], expected[np.array([0, 3])], atol=2e-5)
    assert abs(np.asarray(others[1]) - expected[1]).max() > 0.01


@pytest.mark.long
def test_on_a_mesh_tokens_have_the_adapters_of_their_row():
    """The mesh splits rows, their tokens, and hidden units of experts."""
    tokens, expected = logits_of_experts()
    graphdef, variables = nnx.split(with_banks(with_experts(0), sets_of_experts()))
    chosen = with_chosen(variables, jnp.arange(4))
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, context=2, tensor=2))):
        found = jax.jit(lambda v, t: nnx.merge(graphdef, v)(t))(chosen, tokens)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.long
def test_texts_of_experts_are_as_with_their_adapters_alone():
    wanted = {number: alone(with_experts(number), PROMPTS[number], number) for number in (0, 2)}
    apart = unstacked(jax.jit(lambda: build_model(EXPERTS, EXACT, 0))())
    engine = Engine(with_banks(apart, sets_of_experts()), slots=3, chunk=4, piece=16)
    texts = []
    for number, prompt in enumerate(PROMPTS):
        texts.append(engine.submit(prompt, 12, GREEDY, row=number, adapter=number))
    engine.run()
    for number, other in wanted.items():
        assert texts[number].ids == other.ids
        np.testing.assert_allclose(texts[number].logprobs, other.logprobs, atol=2e-5)


@pytest.mark.every_dose
@pytest.mark.long
def test_adapters_of_experts_are_read_from_the_files_of_peft(tmp_path):
    """PEFT treats all experts as one, and gate and up as one."""
    for number, wanted in enumerate(sets_of_experts(), 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = with_experts(number)
        write_adapters(folder, split_adapters(nnx.state(model))[1], model.config, None)
        found = read_set(folder, "one", EXPERTS)
        assert dataclasses.replace(found.lora, targets=wanted.lora.targets) == wanted.lora
        assert found.arrays.keys() == wanted.arrays.keys()
        for path, array in wanted.arrays.items():
            np.testing.assert_array_equal(found.arrays[path], array)


@pytest.mark.long
def test_the_example_of_the_document_continues_texts_with_several_adapters(tmp_path, monkeypatch):
    shutil.copytree(PARITY / "mixtral", tmp_path / "mixtral")
    model, config = load_pretrained(tmp_path / "mixtral")
    for seed, name in enumerate(("code", "chat"), 1):
        lora = LoraConfig(rank=2 * seed, targets=(r"attention\.q", r"mlp\."))
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        adapted_config = dataclasses.replace(config, lora=lora)
        adapters = split_adapters(nnx.state(with_adapters(adapted_config, seed)))[1]
        write_adapters(folder, adapters, adapted_config, None)
    (program,) = blocks((ROOT / "docs" / "inference.md").read_text(), "python")[1:]
    monkeypatch.chdir(tmp_path)
    space = {}
    exec(compile(program, "docs/inference.md", "exec"), space)
    ids = [tuple(text.ids) for text in space["texts"]]
    assert len(set(ids)) == 3
    assert [len(one) for one in ids] == [8, 8, 8]
    whole = Engine(model, slots=1)
    plain = whole.submit([1, 2, 3], 8, GREEDY)
    whole.run()
    assert ids[0] == tuple(plain.ids)


@pytest.mark.long
@pytest.mark.every_dose
def test_adapters_of_keys_of_latents_are_refused():
    """The products of keys with latents mix all rows."""
    config = dataclasses.replace(
        BASE,
        family="deepseek_v3",
        num_kv_heads=4,
        head_dim=8,
        latent=LatentConfig(kv_rank=8, rope_dim=4, value_dim=8),
        moe=MoeConfig(num_experts=2, experts_per_token=1, dense_layers=3),
        lora=LoraConfig(rank=2, targets=(r"attention\.k$",)),
    )
    shapes = nnx.state(nnx.eval_shape(lambda: build_model(config, EXACT, 0)))
    arrays = {}
    for path, leaf in paths(split_adapters(shapes)[1]).items():
        arrays[path] = np.ones(leaf.get_value().shape, np.float32)
    assert arrays
    plain = dataclasses.replace(config, lora=LoraConfig())
    without = nnx.eval_shape(lambda: build_model(plain, EXACT, 0))
    with pytest.raises(UsageError, match=r"fine: has an adapter of layers.*k, .*maxtrain export"):
        with_banks(without, [AdapterSet("fine", config.lora, arrays)])


@pytest.mark.long
@pytest.mark.every_dose
def test_files_that_are_none_are_refused(folders, tmp_path):
    with pytest.raises(UsageError, match=r"one: .* has no adapter_config\.json"):
        read_set(tmp_path, "one", BASE)
    settings = json.loads((folders[0] / "adapter_config.json").read_text())
    tensors = load_file(folders[0] / "adapter_model.safetensors")

    def written(changes, renamed):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
        save_file(renamed, tmp_path / "adapter_model.safetensors")

    written({"peft_type": "IA3"}, tensors)
    with pytest.raises(ConfigError, match=r"peft_type=IA3 must be LORA\. Use others"):
        read_set(tmp_path, "one", BASE)
    written({"r": 0}, tensors)
    with pytest.raises(DataError, match="r=0 must be a whole number"):
        read_set(tmp_path, "one", BASE)
    written({}, {f"other.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(DataError, match="has no adapter of a product"):
        read_set(tmp_path, "one", BASE)
    name = min(tensors)
    written({}, {other: tensor for other, tensor in tensors.items() if other != name})
    with pytest.raises(DataError, match="missing"):
        read_set(tmp_path, "one", BASE)
