"""What a family is: choices inside the shared decoder, and how Hugging Face writes its
configuration and its weights."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.models.specs import StackSpec
from maxtrain.weights.codec import Entry

# Tensors that may be there and are not read: frequencies that old files carry along, and the copy
# of a tied head.
IGNORED = r".*\.rotary_emb\.inv_freq|lm_head\.weight"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A config.json (`values`) read key by key; all methods raise DataError for what the decoder
    can't do."""

    values: Mapping[str, Any]
    path: Path

    def number(self, name: str, default: Any = None, kind: type = int) -> Any:
        """A number above 0; the default stands in for a missing key and for null."""
        value = default if self.values.get(name) is None else self.values[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, int if kind is int else int | float)
            or not value > 0
        ):
            what = "an integer" if kind is int else "a number"
            raise DataError(
                f"{self.path}: {name}={value} must be {what} above 0. Get the file again from where the model is."
            )
        return kind(value)

    def require(self, name: str, *allowed: Any) -> None:
        """A key may be missing or null, or else one of `allowed`."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            need = " or ".join(map(repr, allowed)) or "null"
            raise DataError(
                f"{self.path}: {name}={value!r} is not supported, only {need}. Choose a model with {name}={need}."
            )

    def rope(self, max_length: int) -> dict[str, Any]:
        """The rope keys of a ModelConfig: of `rope_parameters`, or of `rope_scaling` with
        `rope_theta` beside it."""
        given = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = (
            given.get("rope_type", given.get("type", "default"))
            if isinstance(given, dict)
            else given
        )
        if kind not in ("default", "llama3") or any(
            isinstance(value, dict) for value in given.values()
        ):
            raise DataError(
                f"{self.path}: rope_parameters (or rope_scaling) {given} are not supported, only one set for all layers, of "
                "type 'default' or 'llama3'. Choose a model with one of these."
            )
        inner = Settings({**self.values, **given}, self.path)
        inner.require("partial_rotary_factor", 1.0)
        rope = {"rope_theta": inner.number("rope_theta", 10_000.0, float)}
        if kind == "llama3":
            rope |= {
                f"rope_{k}": inner.number(k, kind=float)
                for k in ("factor", "low_freq_factor", "high_freq_factor")
            }
            rope["rope_original_length"] = inner.number(
                "original_max_position_embeddings", max_length
            )
        return rope | {"rope_scaling": "none" if kind == "default" else kind}


def rope_settings(config: ModelConfig) -> dict[str, Any]:
    """The rope keys of a config.json in both spellings: `rope_parameters`, as transformers 5 writes
    them, and `rope_scaling` with `rope_theta` beside it, as older ones do."""
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


class Family(NamedTuple):
    """One model family."""

    # The class name in Hugging Face configurations.
    architecture: str
    # Its layers.
    stack: Callable[[ModelConfig], StackSpec]
    # The config of a config.json, and what of a config.json the config decides.
    read: Callable[[Settings], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    # Where each parameter stands in a checkpoint: by dotted path, in the order of transformers.
    table: Callable[[ModelConfig], list[Entry]]
