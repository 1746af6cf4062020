"""What a model family is: its choices for the shared decoder, and the form of its configuration
and weights at Hugging Face."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.models.specs import DecoderSpec
from maxtrain.weights.codec import Entry

# Tensors that may be in a file and are not read: rotary frequencies, which old files contain, and
# the head of a model with tied embeddings, which is a copy of its embedding.
IGNORED = r".*\.rotary_emb\.inv_freq|lm_head\.weight"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A config.json, read key by key. All methods raise DataError for a value that the decoder
    does not support."""

    values: Mapping[str, Any]
    path: Path

    def number(self, name: str, default: Any = None, kind: type = int) -> Any:
        """A number above 0; the default if the key is missing or null."""
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
                f"{self.path}: {name}={value} must be {what} above 0. Get the file again from where "
                "the model is."
            )
        return kind(value)

    def with_defaults(self, **defaults: Any) -> "Settings":
        """The same, with values for keys that are missing or null."""
        given = {key: value for key, value in self.values.items() if value is not None}
        null = dict.fromkeys(self.values.keys() - given.keys() - defaults.keys())
        return dataclasses.replace(self, values={**defaults, **given, **null})

    def number_or_null(self, name: str, default: Any, kind: type = int) -> Any:
        """A number above 0, or None if the key is null; the default if it is missing."""
        if self.values.get(name, default) is None:
            return None
        return self.number(name, default, kind)

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
            need = " or ".join(map(repr, allowed)) or "null"
            raise DataError(
                f"{self.path}: {name}={value!r} is not supported, only {need}. Choose a model with "
                f"{name}={need}."
            )

    def rope(self, max_length: int) -> dict[str, Any]:
        """The rope keys of a ModelConfig, from `rope_parameters`, or from `rope_scaling` with
        `rope_theta` beside it."""
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = self._rope_kind(given)
        inner = Settings({**self.values, **given}, self.path)
        inner.require("partial_rotary_factor", 1.0)
        rope = {"rope_theta": inner.number("rope_theta", 10_000.0, float)}
        if kind == "default":
            return rope | {"rope_scaling": "none"}
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            rope[f"rope_{name}"] = inner.number(name, kind=float)
        original_length = inner.number("original_max_position_embeddings", max_length)
        rope["rope_original_length"] = original_length
        return rope | {"rope_scaling": kind}

    def _rope_kind(self, given: Any) -> str:
        """`default` or `llama3`, from `rope_parameters` or `rope_scaling`."""
        kind = given
        is_one_set = False
        if isinstance(given, dict):
            kind = given.get("rope_type", given.get("type", "default"))
            # Some models have a dict of parameters for each kind of layer.
            is_one_set = not any(isinstance(value, dict) for value in given.values())
        if kind not in ("default", "llama3") or not is_one_set:
            raise DataError(
                f"{self.path}: rope_parameters (or rope_scaling) {given} are not supported, only "
                "one set for all layers, of type 'default' or 'llama3'. Choose a model with one of "
                "these."
            )
        return kind


def rope_settings(config: ModelConfig) -> dict[str, Any]:
    """The rope keys of a config.json in both spellings: `rope_parameters`, which transformers 5
    reads, and `rope_scaling` with `rope_theta` beside it, which older versions read."""
    kind: dict[str, Any] = {"rope_type": "default"}
    scaling = None
    if config.rope_scaling == "llama3":
        kind = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_length,
        }
        scaling = kind
    return {
        "rope_parameters": {"rope_theta": config.rope_theta, **kind},
        "rope_scaling": scaling,
        "rope_theta": config.rope_theta,
    }


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
    read: Callable[[Settings], ModelConfig]
    # The keys of a config.json that a ModelConfig decides.
    write: Callable[[ModelConfig], dict[str, Any]]
    # Where each parameter is in a checkpoint, in the order of transformers.
    table: Callable[[ModelConfig], list[Entry]]
    # Names of tensors that may be in a file and are not read.
    ignored: str = IGNORED
    # The name in `table` of a tensor with another name that some files have.
    renamed: Callable[[str], str] = _same
