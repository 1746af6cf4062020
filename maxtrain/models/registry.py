"""Builds a model from its configuration."""

import jax
from flax import nnx

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import InitConfig, ModelConfig, PrecisionConfig
from maxtrain.models.decoder import Decoder
from maxtrain.models.families import FAMILIES
from maxtrain.parallel.sharding import Axes


def build_model(
    config: ModelConfig,
    precision: PrecisionConfig,
    seed: int | jax.Array = 0,
    init: InitConfig | None = None,
) -> Decoder:
    """Build a model with random weights; under `nnx.eval_shape` or `jax.jit` its arrays are
    abstract.

    The same seed (or key) gives the same bits on every mesh. Without `init`, the defaults of
    InitConfig apply; they do not matter for a model whose weights come from elsewhere.

    Raises:
        ConfigError: the config has no vocab_size. A run takes it from its data.
    """
    if config.vocab_size is None:
        raise ConfigError(
            "model.vocab_size=null must be a number when a model is built. Set model.vocab_size to "
            "the size of the tokenizer, such as 32000."
        )
    return Decoder(
        config,
        FAMILIES[config.family].spec(config),
        precision,
        init or InitConfig(),
        nnx.Rngs(params=seed),
    )


def logical_axes(variable: nnx.Variable) -> Axes:
    """Return the logical names of the dims of a parameter; one stacked over layers has `layers` in
    front."""
    axes = variable.get_metadata("axes")
    return ("layers",) * (variable.ndim - len(axes)) + axes
