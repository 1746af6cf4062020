"""Parameters that are stored by other rules than the usual ones: the steps stay the same."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from data_pipeline.base.errors import ConfigError
from maxtrain.config import load_config
from maxtrain.config.schema import MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.config.sections.rules import RulesConfig
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import RULES, stored_rules
from maxtrain.train_step.state import abstract_model, shardings

RULE = RulesConfig(
    embed=("tensor",), mlp=("fsdp", "data"), heads=("data",), kv_heads=(), vocab=("fsdp",)
)


def specs(tree) -> dict[str, PartitionSpec]:
    """Return the specs by path, of one layer where layers are stacked."""
    found = {}
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings(tree)):
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = sharding.spec
    return found


@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.long
def test_steps_of_parameters_stored_elsewhere_are_those_of_one_device(tiny):
    """Three steps, in which the moments of AdamW are stored like their parameters."""
    found = {}
    for shape, rules in (((1, 1, 1), RULES), ((2, 2, 2), stored_rules(RULE))):
        parts = tiny.parts(shape, rules=rules)
        losses = []
        with jax.set_mesh(parts.mesh):
            state = parts.new_state()
            for number in range(3):
                state, metrics = parts.step(state, parts.put(tiny.batch(number)))
                losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        found[shape] = (losses, state)
    (expected, whole), (losses, state) = found.values()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert shardings(state) == shardings(parts.abstract), "steps leave them where they were"
    for x, other in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        other = np.asarray(other)
        most = 1e-5 * max(1, np.abs(other).max())
        np.testing.assert_allclose(np.asarray(x), other, rtol=0, atol=most)
    kernels = {name: spec for name, spec in specs(state).items() if "mlp.up.kernel" in name}
    assert len(kernels) == 3, "parameters and two moments"
    assert set(kernels.values()) == {PartitionSpec(None, "tensor", ("fsdp", "data"))}


def test_a_rule_says_where_an_array_is_and_what_it_must_divide():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    model = ModelConfig(
        vocab_size=64,
        num_layers=2,
        embed_dim=36,
        mlp_dim=48,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
    )

    def placed(**rules):
        rules = stored_rules(RulesConfig(**rules))
        return specs(abstract_model(model, PrecisionConfig(), mesh, rules)[1])

    usual = placed()
    found = placed(embed=(), mlp=("tensor", "fsdp"), head_dim=("fsdp",))
    changed = {name.removesuffix(".value") for name in found if found[name] != usual[name]}
    assert {name for name in changed if name.startswith("layers.0.mlp")} == {
        f"layers.0.mlp.{name}.kernel" for name in ("gate", "up", "down")
    }
    (up,) = {spec for name, spec in found.items() if "mlp.up" in name}
    (q,) = {spec for name, spec in found.items() if "attention.q." in name}
    (table,) = {spec for name, spec in found.items() if name.startswith("embedding")}
    assert up == PartitionSpec(None, None, ("tensor", "fsdp"))
    assert q == PartitionSpec(None, None, "tensor", "fsdp")
    assert table == PartitionSpec("tensor", None)
    with pytest.raises(ConfigError, match=r"'embed' of size 36 must be .* \* mesh\.tensor=2 = 8\."):
        placed(embed=("fsdp", "tensor"), mlp=(), heads=(), kv_heads=(), vocab=())
    with pytest.raises(
        ConfigError,
        match=r"both split over mesh axis 'tensor'\. Set mesh\.rules\.mlp or mesh\.rules\.embed "
        r"without tensor\.",
    ):
        placed(embed=("tensor",), heads=(), kv_heads=(), vocab=())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("embed=[fsdp, fsdp]", "names fsdp more than once.* Set mesh.rules.embed=[fsdp]."),
        ("embed=[fdsp]", "must be: list of data | stage | fsdp | context | expert | tensor."),
        ("activation_batch=[data]", "mesh.rules.activation_batch is not a key."),
        ("layers=[fsdp]", "mesh.rules.layers is not a key."),
    ],
)
def test_rules_that_can_not_be_are_refused_when_they_are_read(override, said):
    with pytest.raises(ConfigError) as error:
        load_config(["config=quickstart", f"mesh.rules.{override}"])
    text = str(error.value)
    for part in said.split(".* "):
        assert part in text, text
