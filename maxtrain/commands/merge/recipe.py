"""A recipe in mergekit's YAML: which models are merged, by which method, with which parameters.

A parameter is a number, a list of numbers that are interpolated over layers, or a list of
`{filter: PART_OF_A_NAME, value: ...}`, of which the first that fits counts. It may stand with a
model, a slice, or for all.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import ConfigError, DataError
from maxtrain.commands.merge.methods import Rescale
from maxtrain.config.words import choices

Setting = Any  # a number, a list of them, or a list of conditions
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class MethodParameter(NamedTuple):
    """A parameter of a method."""

    default: Any
    kind: type = float
    # Of each model, instead of the merge.
    of_models: bool = False


_WEIGHT = MethodParameter(None, of_models=True)
_NORMALIZED = {"weight": _WEIGHT, "normalize": MethodParameter(True, bool)}
_TASK: dict[str, MethodParameter] = {
    "weight": _WEIGHT,
    "density": MethodParameter(1.0, of_models=True),
    "lambda": MethodParameter(1.0),
}


def _task(normalize: bool, rescale: str, **more: MethodParameter) -> dict[str, MethodParameter]:
    return {
        **_TASK,
        "normalize": MethodParameter(normalize, bool),
        "rescale": MethodParameter(rescale, str),
        **more,
    }


_GAMMA = MethodParameter(0.01, of_models=True)
_EPSILON = MethodParameter(0.15, of_models=True)
# By the names of methods.
METHODS: dict[str, dict[str, MethodParameter]] = {
    "linear": _NORMALIZED,
    "soup": {},
    "ema": {"decay": MethodParameter(None)},
    "slerp": {"t": MethodParameter(None)},
    "nuslerp": {
        "weight": _WEIGHT,
        "nuslerp_flatten": MethodParameter(True, bool),
        "nuslerp_row_wise": MethodParameter(False, bool),
    },
    "model_stock": {"filter_wise": MethodParameter(False, bool)},
    "task_arithmetic": {
        "weight": _WEIGHT,
        "lambda": MethodParameter(1.0),
        "normalize": MethodParameter(False, bool),
    },
    "ties": _task(True, "none"),
    "dare_linear": _task(False, "l1"),
    "dare_ties": _task(False, "l1"),
    "breadcrumbs": _task(False, "none", gamma=_GAMMA),
    "breadcrumbs_ties": _task(False, "none", gamma=_GAMMA),
    "della_linear": _task(False, "l1", epsilon=_EPSILON),
    "della": _task(True, "l1", epsilon=_EPSILON),
}
# Methods that add differences from a base to it.
OF_DIFFERENCES = tuple(name for name, known in METHODS.items() if "lambda" in known)
NEED_BASE = (*OF_DIFFERENCES, "slerp", "model_stock")
RANDOM = ("dare_linear", "dare_ties", "della_linear", "della")
_RESCALES: dict[Any, Rescale] = {
    True: "l1",
    False: "none",
    "l1": "l1",
    "none": "none",
    "density": "density",
}
_DTYPES = ("float32", "bfloat16", "float16")


class MergeSource(NamedTuple):
    """A model of the recipe."""

    place: str
    parameters: Mapping[str, Setting]


@dataclasses.dataclass(frozen=True)
class MergeRecipe:
    """Recipe of a merge.

    Attributes:
        method: of METHODS.
        models: in the order of the recipe; the base is among them only if the recipe names it
            there.
        base: the base model's place; None: there is none.
        parameters: for all models and tensors.
        dtype: of the tensors that are written; None: that of the first model, or of the base.
        tokenizer: place of the model whose tokenizer is taken; None: all must have the same.
        seed: of what is random.
        text: the recipe as it was read.
        layers: that are merged, from the first to before the last; None: all.
    """

    method: str
    models: tuple[MergeSource, ...]
    base: str | None
    parameters: Mapping[str, Setting]
    dtype: str | None
    tokenizer: str | None
    seed: int
    text: str
    layers: tuple[int, int] | None = None

    def require_all_layers(self, num_layers: int) -> None:
        """Check that the recipe merges all layers of models with `num_layers` layers. ConfigError:
        it merges a part.
        """
        if self.layers in (None, (0, num_layers)):
            return
        raise ConfigError(
            f"layer_range={list(self.layers)} must be [0, {num_layers}], since the models have "
            f"{num_layers} layers and all of them are merged. Set layer_range: [0, {num_layers}], "
            "or "
            "leave it out."
        )

    def places(self) -> tuple[str, ...]:
        """Places of all models, the base first, each once."""
        named = [source.place for source in self.models]
        if self.base is not None:
            named = [self.base, *named]
        return tuple(dict.fromkeys(named))

    def value(
        self, name: str, tensor: str, num_layers: int, source: MergeSource | None = None
    ) -> Any:
        """A parameter for a tensor, of a model or of the whole merge.

        Raises:
            ConfigError: it has no value, and there is no default.
        """
        settings = []
        if source is not None:
            settings.append(source.parameters.get(name))
        settings.append(self.parameters.get(name))
        depth = _depth(tensor, num_layers)
        for setting in settings:
            found = _evaluated(setting, tensor, depth)
            if found is not None:
                return found
        default = METHODS[self.method][name].default
        if default is None:
            where = ""
            if source is not None:
                where = f" of model {source.place}"
            raise ConfigError(
                f"merge_method={self.method} needs {name}{where} for {tensor}, and the recipe has "
                f"none. Add it: parameters: {{{name}: 0.5}}, for example."
            )
        return default


def _depth(tensor: str, num_layers: int) -> float:
    """Return where a tensor's layer stands, from 0 to 1; 0 for tensors of no layer."""
    match = _LAYER.search(tensor)
    if match is None:
        return 0.0
    if num_layers == 1:
        return 1.0
    return int(match[1]) / (num_layers - 1)


def num_layers(tensors: Sequence[str]) -> int:
    """Return how many layers tensors of these names belong to; 0: to none."""
    numbers = [int(match[1]) for name in tensors if (match := _LAYER.search(name))]
    return max(numbers, default=-1) + 1


def _evaluated(setting: Setting, tensor: str, depth: float) -> Any:
    """The value of a setting for a tensor; None: it says nothing of it."""
    if not isinstance(setting, list):
        return setting
    if all(isinstance(value, bool | str) for value in setting):
        return setting[int(depth * (len(setting) - 1))]
    if all(isinstance(value, int | float) for value in setting):
        place = depth * (len(setting) - 1)
        before = int(place)
        after = min(before + 1, len(setting) - 1)
        share = place - before
        return (1 - share) * setting[before] + share * setting[after]
    for condition in setting:
        wanted = condition.get("filter")
        if wanted in (None, "*") or wanted in tensor:
            return _evaluated(condition["value"], tensor, depth)
    return None


def read_recipe(path: str | Path) -> MergeRecipe:
    """The recipe in a file.

    Raises:
        DataError: it can't be read, or is no YAML.
        ConfigError: with every problem of it.
    """
    try:
        text = strict_yaml.read_text(Path(path).expanduser())
        values = strict_yaml.loads(text)
    except (OSError, ValueError) as error:
        reason: object = error
        if isinstance(error, OSError):
            reason = error.strerror
        raise DataError(
            f"{path}: can't be read as a recipe ({reason}). Name a YAML file in the form of "
            "mergekit."
        ) from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: is no recipe, but {type(values).__name__}. Name a YAML file.")
    return recipe_of(values, text)


def recipe_of(values: Mapping[str, Any], text: str = "") -> MergeRecipe:
    """The recipe that values of YAML describe; ConfigError: with every problem of it."""
    problems = list(_problems(values))
    if problems:
        raise ConfigError(problems)
    parameters = values.get("parameters") or {}
    sources = values.get("models")
    if sources is None:
        (one,) = values["slices"]
        sources = one["sources"]
        parameters = {**parameters, **(one.get("parameters") or {})}
    models = tuple(MergeSource(str(s["model"]), s.get("parameters") or {}) for s in sources)
    layers = None
    if sources[0].get("layer_range") is not None:
        first, end = sources[0]["layer_range"]
        layers = (first, end)
    base = values.get("base_model")
    tokenizer = values.get("tokenizer_source")
    if tokenizer == "base":
        tokenizer = base
    return MergeRecipe(
        method=values["merge_method"],
        models=models,
        base=base,
        parameters=parameters,
        dtype=values.get("out_dtype") or values.get("dtype"),
        tokenizer=tokenizer,
        seed=int(values.get("seed", 0)),
        text=text,
        layers=layers,
    )


_KEYS = (
    "merge_method",
    "models",
    "slices",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "seed",
)


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    unknown = values.keys() - set(_KEYS)
    for key in sorted(map(str, unknown)):
        yield f"{key} is not supported in a recipe. Use some of {', '.join(_KEYS)}."
    method = values.get("merge_method")
    if not isinstance(method, str) or method not in METHODS:
        yield f"merge_method={method} is unknown. Use one of {', '.join(METHODS)}."
        return
    for key in ("dtype", "out_dtype"):
        if values.get(key) not in (None, *_DTYPES):
            yield f"{key}={values[key]} is not supported. Set it to {choices(_DTYPES)}."
    seed = values.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        yield f"seed={seed} must be a whole number of at least 0. Set seed: 0."
    sources = _sources(values)
    if isinstance(sources, str):
        yield sources
        return
    yield from _model_problems(values, method, sources)
    known = METHODS[method]
    sets = [("parameters", values.get("parameters"))]
    for source in sources:
        sets.append((f"parameters of model {source.get('model')}", source.get("parameters")))
    for one in values.get("slices") or []:
        sets.append(("parameters of the slice", one.get("parameters")))
    for where, settings in sets:
        yield from _setting_problems(where, settings, method, known)


def _sources(values: Mapping[str, Any]) -> list[dict[str, Any]] | str:
    """The models as the recipe has them, or what is wrong with them."""
    models = values.get("models")
    slices = values.get("slices")
    if (models is None) == (slices is None):
        return "a recipe must have either models or slices. Name the models that are merged."
    if slices is not None:
        if not isinstance(slices, list) or len(slices) != 1 or not isinstance(slices[0], dict):
            return (
                "slices must be one slice of all layers: models whose layers are put together in "
                "another order are not supported. Use models."
            )
        models = slices[0].get("sources")
    if not isinstance(models, list) or not models or not all(map(_is_source, models)):
        return "models must be a list of entries with `model: DIR`. Name at least one."
    ranges = {str(model.get("layer_range")) for model in models}
    if len(ranges) > 1:
        return f"layer_range must be that of all layers for every model, not {sorted(ranges)}."
    layers = models[0].get("layer_range")
    if layers is not None and not _is_range(layers):
        return f"layer_range={layers} must be two numbers of layers. Leave it out for all layers."
    return models


def _is_source(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("model"), str) and bool(entry["model"])


def _is_range(layers: Any) -> bool:
    return isinstance(layers, list) and len(layers) == 2 and all(type(n) is int for n in layers)


def _model_problems(
    values: Mapping[str, Any], method: str, sources: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Too few or too many models for a method, or no base where there must be one."""
    places = [str(source["model"]) for source in sources]
    if len(set(places)) < len(places):
        yield f"models {places} must have no model twice. Leave out the second one."
    base = values.get("base_model")
    if base is not None and not isinstance(base, str):
        yield f"base_model={base} must be a directory. Write base_model: DIR."
        return
    if method in NEED_BASE and base is None:
        yield f"merge_method={method} needs a base_model. Add base_model: DIR."
        return
    others = [place for place in places if place != base]
    if method == "slerp" and (len(places) != 2 or base not in places):
        rule = "merges two models, of which one is the base_model"
        yield f"merge_method=slerp {rule}. Name these two."
    if method == "nuslerp" and len(others) != 2:
        yield "merge_method=nuslerp merges two models beside the base_model. Name two."
    if method == "model_stock" and len(others) < 2:
        yield "merge_method=model_stock needs two models or more beside the base_model. Add some."
    if method in OF_DIFFERENCES and not others:
        yield f"merge_method={method} needs a model beside the base_model. Add one."
    if method in ("linear", "soup", "ema") and base is not None:
        yield f"merge_method={method} has no base_model. Leave base_model out; name it in models."
    source = values.get("tokenizer_source")
    if source not in (None, "base", base, *places):
        yield (
            f"tokenizer_source={source} must be base or one of the models. Leave it out if all "
            "have the same tokenizer."
        )


def _setting_problems(
    where: str, settings: Any, method: str, known: Mapping[str, MethodParameter]
) -> Iterator[str]:
    if settings is None:
        return
    if not isinstance(settings, dict):
        yield f"{where} must be names with values. Write for example parameters: {{weight: 0.5}}."
        return
    for name, setting in settings.items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            yield f"{where}: merge_method={method} has no {name}. Its parameters are: {allowed}."
            continue
        form = _form_problem(name, setting)
        if form:
            yield f"{where}: {form}"
            continue
        for value in _values_of(setting):
            problem = _value_problem(name, value, known[name])
            if problem:
                yield f"{where}: {problem}"


def _form_problem(name: str, setting: Any) -> str:
    """Return the problem with a list of values, or nothing."""
    if not isinstance(setting, list):
        return ""
    if not setting:
        return f"{name}=[] has no value. Write a value, or leave {name} out."
    conditions = [entry for entry in setting if isinstance(entry, dict)]
    if not conditions:
        kinds = {isinstance(value, bool | str) for value in setting}
        if len(kinds) > 1:
            return f"{name}={setting} has values of two kinds. Write numbers alone, or words alone."
        return ""
    if len(conditions) < len(setting):
        return (
            f"{name}={setting} has values beside conditions. Write {{value: X}} for such a value."
        )
    for condition in conditions:
        wanted = condition.get("filter")
        is_text = wanted is None or isinstance(wanted, str)
        if not is_text or "value" not in condition or condition.keys() - {"filter", "value"}:
            return (
                f"{name}: {condition} must be {{filter: PART_OF_A_NAME, value: X}}. "
                "Write the filter as a text, or leave it out."
            )
        inner = condition["value"]
        if isinstance(inner, dict) or (
            isinstance(inner, list) and any(isinstance(x, dict | list) for x in inner)
        ):
            return f"{name}: the value of {condition} must be a value or a list of values."
        problem = _form_problem(name, inner)
        if problem:
            return problem
    return ""


def _values_of(setting: Setting) -> Iterator[Any]:
    """All values that a setting may give."""
    if not isinstance(setting, list):
        yield setting
        return
    for value in setting:
        if isinstance(value, dict):
            yield from _values_of(value.get("value"))
        else:
            yield value


def _value_problem(name: str, value: Any, parameter: MethodParameter) -> str:
    """Return the problem with a value, or nothing."""
    if name == "rescale":
        if not isinstance(value, bool | str) or value not in _RESCALES:
            return f"rescale={value} must be true, false, l1 or density. Set rescale: true."
        return ""
    if parameter.kind is bool:
        if not isinstance(value, bool):
            return f"{name}={value} must be true or false. Set {name}: true."
        return ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value or abs(value) == float("inf"):
        return f"{name}={value} must be a number. Set {name}: 0.5, for example."
    bounds = {"density": (0, 1), "gamma": (0, 1), "epsilon": (0, 1), "t": (0, 1), "decay": (0, 1)}
    low, high = bounds.get(name, (-1e9, 1e9))
    if not low <= value <= high:
        return f"{name}={value} must be from {low:g} to {high:g}. Set {name} to such a number."
    return ""


def rescale_of(value: bool | str) -> Rescale:
    """Return what may be written, as methods have it."""
    return _RESCALES[value]
