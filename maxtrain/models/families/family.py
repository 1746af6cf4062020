"""Model families: the settings of a family for the shared decoder, and the format of its
configuration and weights at Hugging Face."""

import dataclasses
import re
import reprlib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import DataError
from maxtrain.config.schema import ModelConfig, MoeConfig, RopeConfig
from maxtrain.config.sections.moe import expert_problems
from maxtrain.config.words import choices, show
from maxtrain.models.hf_mapping import Flatten, ParamMapping, Transpose
from maxtrain.models.specs import DecoderSpec
from maxtrain.ops.rope_scaling import longrope_attention_factor

# Name of the head in all families.
HEAD = "lm_head.weight"
# Tensors that a file may contain and that are not read: rotary frequencies, which old files
# contain, and the head of a model with tied embeddings, which must be a copy of its embedding.
IGNORED = r".*\.rotary_emb\.inv_freq|lm_head\.weight"
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


# The largest numbers that are read from a config.json, by key. They are far above those of any
# model, and low enough for every loop and product over them.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "n_layer": 10_000,
    "first_k_dense_replace": 10_000,
    "hidden_size": 1 << 20,
    "n_embd": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "shared_expert_intermediate_size": 1 << 24,
    "n_inner": 1 << 24,
    "vocab_size": 1 << 28,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "n_head": 1 << 16,
    "head_dim": 1 << 20,
    "v_head_dim": 1 << 20,
    "qk_nope_head_dim": 1 << 20,
    "qk_rope_head_dim": 1 << 20,
    "kv_lora_rank": 1 << 20,
    "q_lora_rank": 1 << 20,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "n_shared_experts": 1 << 16,
}
_LARGEST_INTEGER = 2**31 - 1
_LARGEST_NUMBER = 1e30


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """A config.json, read key by key. All methods raise DataError for a value that the decoder does
    not support."""

    values: Mapping[str, Any]
    path: Path

    def number(self, name: str, default: Any = None, kind: type = int) -> Any:
        """Return a number above 0 and up to the largest that is read; the default if the key is
        missing or null."""
        value = self.values.get(name)
        if value is None:
            value = default
        allowed: Any = int
        what = "an integer"
        if kind is float:
            allowed = int | float
            what = "a number"
        # Python counts True as an int.
        is_number = isinstance(value, allowed) and not isinstance(value, bool)
        if not is_number or not value > 0:
            raise DataError(
                f"{self.path}: {name}={show(value)} must be {what} above 0. Get the file again "
                "from where the model is."
            )
        most = _LARGEST_NUMBER
        if kind is int:
            most = _LARGEST.get(name, _LARGEST_INTEGER)
        if value > most:
            raise DataError(
                f"{self.path}: {name}={show(value)} must be at most {most:,}. Get the file again "
                "from where the model is."
            )
        return kind(value)

    def with_defaults(self, **defaults: Any) -> "HfConfig":
        """Return a copy with values for keys that are missing or null."""
        given = {key: value for key, value in self.values.items() if value is not None}
        null = dict.fromkeys(self.values.keys() - given.keys() - defaults.keys())
        return dataclasses.replace(self, values={**defaults, **given, **null})

    def where_missing(self, **defaults: Any) -> "HfConfig":
        """Return a copy with values for keys that are missing; null stays."""
        return dataclasses.replace(self, values={**defaults, **self.values})

    def number_or_null(self, name: str, default: Any, kind: type = int) -> Any:
        """Return a number above 0, or None if the key is null; the default if it is missing."""
        if self.values.get(name, default) is None:
            return None
        return self.number(name, default, kind)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false; the default if the key is missing."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise DataError(
                f"{self.path}: {name}={show(value)} must be true or false. Get the file again from "
                "where the model is."
            )
        return value

    def tied(self, default: bool) -> bool:
        """Return True if the head is the embedding; the default if the key is missing or null."""
        if self.values.get("tie_word_embeddings") is None:
            return default
        return self.flag("tie_word_embeddings", default)

    def experts(self, moe: MoeConfig) -> MoeConfig:
        """Return the same experts; raise DataError if the numbers do not fit together."""
        for problem in expert_problems(moe):
            raise DataError(f"{self.path}: {problem} Get the file again from where the model is.")
        return moe

    def require_heads(self, heads: int, kv_heads: int, size: int) -> None:
        """Raise DataError if the heads can't be grouped, or their size is odd and can't be rotated
        in pairs."""
        if heads % kv_heads or size % 2:
            raise DataError(
                f"{self.path}: num_key_value_heads={kv_heads} must divide "
                f"num_attention_heads={heads}, and head_dim={size} must be even. Get the file "
                "again from where the model is."
            )

    def require(self, name: str, *allowed: Any) -> None:
        """Raise DataError if a key is present, not null, and none of `allowed`."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            need = " or ".join(map(_repr, allowed)) or "null"
            raise DataError(
                f"{self.path}: {name}={_repr(value)} is not supported, only {need}. Choose a model "
                f"with {name}={need}."
            )

    def rope(self, max_length: int) -> dict[str, Any]:
        """Return the rope keys of a ModelConfig, from `rope_scaling` with `rope_theta` beside it,
        or from `rope_parameters`. Where both are present, all versions of transformers use the
        first."""
        given = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        kind = self._rope_kind(given)
        inner = HfConfig({**self.values, **given}, self.path)
        inner.require("partial_rotary_factor", 1.0)
        theta = inner.number("rope_theta", 10_000.0, float)
        if kind == "default":
            return {"rope_theta": theta, "rope_scaling": "none"}
        scaling = self._rope_scaling(kind, given, max_length)
        if kind == "yarn" and theta <= 1:
            raise DataError(
                f"{self.path}: rope_theta={theta} must be more than 1 with rope_type 'yarn'. "
                "Get the file again from where the model is."
            )
        return {"rope_theta": theta, "rope_scaling": kind, **scaling}

    def _rope_scaling(self, kind: str, given: Mapping[str, Any], max_length: int) -> dict[str, Any]:
        """Return the keys of a ModelConfig that a scaling reads, from a set of rope parameters."""
        own = HfConfig(given, self.path)
        original = max_length
        if kind in ("llama3", "yarn", "longrope"):
            # A value at the top level, as in Phi 3, takes precedence.
            original = own.number("original_max_position_embeddings", max_length)
            original = self.number("original_max_position_embeddings", original)
        factor = None
        is_null = "factor" in given and given["factor"] is None
        if kind == "longrope" or (kind == "yarn" and is_null):
            factor = max(1.0, max_length / original)
        scaling: dict[str, Any] = {"rope_factor": own.at_least_1("factor", factor)}
        if kind != "linear":
            scaling["rope_original_length"] = original
        if kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor"):
                scaling[f"rope_{name}"] = own.number(name, kind=float)
        if kind == "yarn":
            scaling["rope"] = own._yarn()
        if kind == "longrope":
            heads = self.number("num_attention_heads")
            size = self.number("head_dim", self.number("hidden_size") // heads)
            scaling["rope"] = own._longrope(original, size // 2)
        return scaling

    def at_least_1(self, name: str, default: float | None) -> float:
        """Return a number of at least 1; the default if the key is missing or null."""
        value = self.number(name, default, float)
        if value < 1:
            raise DataError(
                f"{self.path}: {name}={value} must be a number of at least 1. Get the file again "
                "from where the model is."
            )
        return value

    def _rope_kind(self, given: Any) -> str:
        """Return the type in `rope_parameters` or `rope_scaling`."""
        kind = given
        is_one_set = False
        if isinstance(given, dict):
            kind = given.get("rope_type", given.get("type", "default"))
            # Some models have a dict of parameters for each kind of layer.
            is_one_set = not any(isinstance(value, dict) for value in given.values())
        if kind not in _ROPE_TYPES or not is_one_set:
            known = choices(map(repr, _ROPE_TYPES))
            raise DataError(
                f"{self.path}: rope_parameters (or rope_scaling) {show(given)} are not supported, "
                f"only one set for all layers, of type {known}. Choose a model with one of these."
            )
        return kind

    def _yarn(self) -> RopeConfig:
        """Return the parameters of YaRN from the keys of a set of rope parameters."""
        truncate = self.flag("truncate", True)
        usual = RopeConfig()
        beta_fast = self.number("beta_fast", usual.beta_fast, float)
        beta_slow = self.number("beta_slow", usual.beta_slow, float)
        if beta_fast <= beta_slow:
            raise DataError(
                f"{self.path}: beta_fast={beta_fast} must be more than beta_slow={beta_slow}. "
                "Get the file again from where the model is."
            )
        attention_factor = self.number_or_null("attention_factor", None, float)
        mscale = self.number_or_null("mscale", None, float)
        mscale_all_dim = self.number_or_null("mscale_all_dim", None, float)
        # These two count only together, and without an attention factor that is given.
        if attention_factor is not None or None in (mscale, mscale_all_dim):
            mscale = None
            mscale_all_dim = None
        return RopeConfig(
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=truncate,
            attention_factor=attention_factor,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
        )

    def _longrope(self, original_length: int, pairs: int) -> RopeConfig:
        """Return the parameters of LongRoPE from the keys of a set of rope parameters."""
        attention_factor = self.number_or_null("attention_factor", None, float)
        if original_length == 1 and attention_factor is None:
            raise DataError(
                f"{self.path}: original_max_position_embeddings=1 must be more than 1 with "
                "rope_type 'longrope'. Get the file again from where the model is."
            )
        return RopeConfig(
            attention_factor=attention_factor,
            short_factors=self._pair_factors("short_factor", pairs),
            long_factors=self._pair_factors("long_factor", pairs),
        )

    def _pair_factors(self, name: str, pairs: int) -> tuple[float, ...]:
        """Return a list of numbers above 0, one for each pair of a head."""
        factors = self.values.get(name)
        if not isinstance(factors, list) or len(factors) != pairs:
            raise DataError(
                f"{self.path}: {name}={show(factors)} must be a list of {pairs} numbers, one for "
                "each pair of a head. Get the file again from where the model is."
            )
        numbered = {f"{name}[{index}]": factor for index, factor in enumerate(factors)}
        listed = HfConfig(numbered, self.path)
        return tuple(listed.number(key, kind=float) for key in numbered)


def rope_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the rope keys of a config.json in both spellings: `rope_parameters`, which
    transformers 5 reads, and `rope_scaling` with `rope_theta` beside it, which older versions read.

    With the scaling "dynamic", transformers has one key for the original length and for the longest
    sequence: max_position_embeddings is then the original length, independent of model.max_length.
    """
    kind = _rope_parameters(config)
    settings: dict[str, Any] = {}
    if config.rope_scaling == "dynamic":
        settings["max_position_embeddings"] = config.rope_original_length
    if config.rope_scaling == "longrope":
        # Both older and newer versions read it here.
        settings["original_max_position_embeddings"] = config.rope_original_length
    scaling = None
    if config.rope_scaling != "none":
        scaling = kind
    return settings | {
        "rope_parameters": {"rope_theta": config.rope_theta, **kind},
        "rope_scaling": scaling,
        "rope_theta": config.rope_theta,
    }


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return one set of rope parameters of a config.json, without the base."""
    if config.rope_scaling == "none":
        return {"rope_type": "default"}
    kind: dict[str, Any] = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        kind["low_freq_factor"] = config.rope_low_freq_factor
        kind["high_freq_factor"] = config.rope_high_freq_factor
    if config.rope_scaling in ("llama3", "yarn", "longrope"):
        kind["original_max_position_embeddings"] = config.rope_original_length
    if config.rope_scaling == "yarn":
        kind |= _yarn_parameters(config.rope)
    if config.rope_scaling == "longrope":
        kind |= _longrope_parameters(config)
    return kind


def _yarn_parameters(rope: RopeConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
    }
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        value = getattr(rope, name)
        if value is not None:
            parameters[name] = value
    return parameters


def _longrope_parameters(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    parameters: dict[str, Any] = {
        "short_factor": list(rope.short_factors),
        "long_factor": list(rope.long_factors),
    }
    factor = rope.attention_factor
    if factor is None and config.rope_factor != config.max_length / config.rope_original_length:
        # Older versions would use the ratio of the lengths instead of the factor.
        factor = longrope_attention_factor(config.rope_factor, config.rope_original_length)
    if factor is not None:
        parameters["attention_factor"] = factor
    return parameters


def _repr(value: Any) -> str:
    """Return the Python repr of a value, shortened: a list in a foreign file may have any
    length."""
    return reprlib.Repr(maxstring=100, maxother=100).repr(value)


def _same(name: str) -> str:
    return name


def plain_number(value: float) -> int | float:
    """Return the number as a config.json writes it: whole numbers without a decimal point."""
    if float(value).is_integer():
        return int(value)
    return value


class Family(NamedTuple):
    """A model family."""

    # The class name in Hugging Face configurations.
    architecture: str
    # Builds the specification of a model.
    spec: Callable[[ModelConfig], DecoderSpec]
    # Reads the ModelConfig from a config.json.
    read: Callable[[HfConfig], ModelConfig]
    # Returns the keys of a config.json that a ModelConfig decides.
    write: Callable[[ModelConfig], dict[str, Any]]
    # Maps the parameters of a model with logits to a checkpoint, in the order of transformers; code
    # that reads or writes tensors calls `tensors`.
    table: Callable[[ModelConfig], list[ParamMapping]]
    # Names of tensors that a file may contain and that are not read.
    ignored: str = IGNORED
    # Returns the name in `table` of a tensor that some files name differently.
    renamed: Callable[[str], str] = _same
    # Released models, by their names.
    presets: Mapping[str, ModelConfig] = types.MappingProxyType({})
    # The positions have learned vectors, one for each of max_length.
    learns_positions: bool = False
    # The class name of models that also process images and whose text part is of this family: its
    # config is their `text_config`. Empty: there are none.
    text_part_of: str = ""
    # Patterns of the tensors of a model's other parts, by the name of the part.
    other_parts: Mapping[str, str] = types.MappingProxyType({})
    # The class name of models with a score; empty: the name that the usual rule gives.
    scored: str = ""

    def scored_architecture(self) -> str:
        """Return the class name of models with a score in the place of logits."""
        usual = re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", self.architecture)
        return self.scored or usual

    def tensors(self, config: ModelConfig) -> list[ParamMapping]:
        """Return the mapping of each parameter of a model to a checkpoint."""
        entries = self.table(config)
        if not config.score:
            return entries
        kept = [entry for entry in entries if entry.params != ("head.kernel",)]
        score = ParamMapping(("score.kernel",), ("score.weight",), (Flatten(1), Transpose()))
        return [*kept, score]
