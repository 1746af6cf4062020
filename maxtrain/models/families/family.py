"""What a model family is: its choices for the shared decoder, and the form of its configuration
and weights at Hugging Face."""

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

# The head, in all families.
HEAD = "lm_head.weight"
# Tensors that may be in a file and are not read: rotary frequencies, which old files contain, and
# the head of a model with tied embeddings, which must be a copy of its embedding.
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
    """A config.json, read key by key. All methods raise DataError for a value that the decoder
    does not support."""

    values: Mapping[str, Any]
    path: Path

    def number(self, name: str, default: Any = None, kind: type = int) -> Any:
        """A number above 0 and not above the largest that is read; the default if the key is
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
        """The same, with values for keys that are missing or null."""
        given = {key: value for key, value in self.values.items() if value is not None}
        null = dict.fromkeys(self.values.keys() - given.keys() - defaults.keys())
        return dataclasses.replace(self, values={**defaults, **given, **null})

    def where_missing(self, **defaults: Any) -> "HfConfig":
        """The same, with values for keys that are missing; null stays."""
        return dataclasses.replace(self, values={**defaults, **self.values})

    def number_or_null(self, name: str, default: Any, kind: type = int) -> Any:
        """A number above 0, or None if the key is null; the default if it is missing."""
        if self.values.get(name, default) is None:
            return None
        return self.number(name, default, kind)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; the default if the key is missing."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise DataError(
                f"{self.path}: {name}={show(value)} must be true or false. Get the file again from "
                "where the model is."
            )
        return value

    def tied(self, default: bool) -> bool:
        """Whether the head is the embedding; the default if the key is missing or null."""
        if self.values.get("tie_word_embeddings") is None:
            return default
        return self.flag("tie_word_embeddings", default)

    def experts(self, moe: MoeConfig) -> MoeConfig:
        """The same experts; refuses numbers that do not fit together."""
        for problem in expert_problems(moe):
            raise DataError(f"{self.path}: {problem} Get the file again from where the model is.")
        return moe

    def require_heads(self, heads: int, kv_heads: int, size: int) -> None:
        """Refuses heads that can't be grouped, and heads that can't be turned in pairs."""
        if heads % kv_heads or size % 2:
            raise DataError(
                f"{self.path}: num_key_value_heads={kv_heads} must divide "
                f"num_attention_heads={heads}, and head_dim={size} must be even. Get the file "
                "again from where the model is."
            )

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses a key that is there, not null, and none of `allowed`."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            need = " or ".join(map(_repr, allowed)) or "null"
            raise DataError(
                f"{self.path}: {name}={_repr(value)} is not supported, only {need}. Choose a model "
                f"with {name}={need}."
            )

    def rope(self, max_length: int) -> dict[str, Any]:
        """The rope keys of a ModelConfig, from `rope_scaling` with `rope_theta` beside it, or from
        `rope_parameters`. Where both are there, all versions of transformers take the first."""
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
        """The keys of a ModelConfig that a scaling reads, from a set of rope parameters."""
        own = HfConfig(given, self.path)
        original = max_length
        if kind in ("llama3", "yarn", "longrope"):
            # Where it stands at the top, too, as in Phi 3, that one counts.
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
        """A number of at least 1; the default if the key is missing or null."""
        value = self.number(name, default, float)
        if value < 1:
            raise DataError(
                f"{self.path}: {name}={value} must be a number of at least 1. Get the file again "
                "from where the model is."
            )
        return value

    def _rope_kind(self, given: Any) -> str:
        """The type in `rope_parameters` or `rope_scaling`."""
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
        """What YaRN reads, from the keys of a set of rope parameters."""
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
        """What LongRoPE reads, from the keys of a set of rope parameters."""
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
        """A list of numbers above 0, one for each pair of a head."""
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
    """The rope keys of a config.json in both spellings: `rope_parameters`, which transformers 5
    reads, and `rope_scaling` with `rope_theta` beside it, which older versions read.

    With the scaling "dynamic", transformers has one key for the original length and for the longest
    sequence: max_position_embeddings is the original length then, whatever model.max_length is.
    """
    kind = _rope_parameters(config)
    settings: dict[str, Any] = {}
    if config.rope_scaling == "dynamic":
        settings["max_position_embeddings"] = config.rope_original_length
    if config.rope_scaling == "longrope":
        # Older versions read it here, and newer ones, too.
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
    """One set of rope parameters of a config.json, without the base."""
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
        # Older versions would take the ratio of the lengths in place of the factor.
        factor = longrope_attention_factor(config.rope_factor, config.rope_original_length)
    if factor is not None:
        parameters["attention_factor"] = factor
    return parameters


def _repr(value: Any) -> str:
    """A value as Python writes it, shortened: a stranger's list may have any length."""
    return reprlib.Repr(maxstring=100, maxother=100).repr(value)


def _same(name: str) -> str:
    return name


def plain_number(value: float) -> int | float:
    """As a config.json has it: whole numbers without a point."""
    if float(value).is_integer():
        return int(value)
    return value


class Family(NamedTuple):
    """One model family."""

    # The class name in Hugging Face configurations.
    architecture: str
    # What a model is made of.
    spec: Callable[[ModelConfig], DecoderSpec]
    # The ModelConfig that a config.json describes.
    read: Callable[[HfConfig], ModelConfig]
    # The keys of a config.json that a ModelConfig decides.
    write: Callable[[ModelConfig], dict[str, Any]]
    # Where each parameter of a model with logits is in a checkpoint, in the order of transformers;
    # whoever reads or writes tensors asks `tensors`.
    table: Callable[[ModelConfig], list[ParamMapping]]
    # Names of tensors that may be in a file and are not read.
    ignored: str = IGNORED
    # The name in `table` of a tensor with another name that some files have.
    renamed: Callable[[str], str] = _same
    # Models that have been released, by their names.
    presets: Mapping[str, ModelConfig] = types.MappingProxyType({})
    # Its positions have learned vectors, as many as max_length.
    learns_positions: bool = False
    # The class name of models that also see pictures, whose part for text is one of this family:
    # its config is `text_config` there. Empty: there are none.
    text_part_of: str = ""
    # Names of the tensors of a model's other parts, by what the parts are called.
    other_parts: Mapping[str, str] = types.MappingProxyType({})
    # What `architecture` is called of models with a score; empty: as by the usual rule.
    scored: str = ""

    def scored_architecture(self) -> str:
        """The class name of models with a score in the place of logits."""
        usual = re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", self.architecture)
        return self.scored or usual

    def tensors(self, config: ModelConfig) -> list[ParamMapping]:
        """Where each parameter of a model is in a checkpoint."""
        entries = self.table(config)
        if not config.score:
            return entries
        kept = [entry for entry in entries if entry.params != ("head.kernel",)]
        score = ParamMapping(("score.kernel",), ("score.weight",), (Flatten(1), Transpose()))
        return [*kept, score]
