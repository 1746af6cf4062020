"""What must hold across keys and needs neither device nor data; problems are gathered, never raised one by one.

A rule yields messages with the values, the rule and the mend. `check_devices` and `fit_to_devices` are for later, when the
number of devices is known.
"""

import dataclasses
import difflib
import itertools
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data_pipeline.errors import ConfigError
from maxtrain.config.keys import choices, show
from maxtrain.config.schema import MeshConfig, RunConfig

_LIMITS = (("low", operator.lt, "at least"), ("above", operator.le, "more than"), ("high", operator.gt, "at most"))


def out_of_range(path: str, value: Any, limits: Mapping[str, Any]) -> str | None:
    """The problem with a value outside its key's limits, None if it is inside or not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    for name, outside, words in _LIMITS:
        limit = limits[name]
        if limit is not None and outside(value, limit):
            return f"{path}={value} must be {words} {limit}. Set {path} to {words} {limit}."
    return None


def problems_across(config: RunConfig, known_bad: Iterable[str] = ()) -> list[str]:
    """Every cross-field problem that needs no device and no data.

    Args:
        config: each value inside its own type and range.
        known_bad: keys already complained about; what mentions them is left out, since their values are not the user's.
    """
    rules = (_run, _directories, _sources, _stages, _model, _optimizer, _batch, _mesh, _tensor)
    found = itertools.chain.from_iterable(rule(config) for rule in rules)
    bad = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, known_bad)) or '(?!)'})(?!\w)")
    return [text for text in found if not bad.search(text)]


def check_devices(mesh: MeshConfig, num_devices: int) -> list[str]:
    """The problem, if any, of arranging all the job's devices on the mesh's axes, with the nearest valid sizes."""
    sizes = {key: size for key, size in _axes(mesh).items() if size > 0}
    product, free = math.prod(sizes.values()), len(sizes) < 3
    if num_devices == product or (free and num_devices % product == 0):
        return []
    mends = []
    for key, size in sizes.items():
        if num_devices % (rest := product // size) == 0:  # so changing this axis alone is enough
            share = num_devices // rest
            mends.append(f"{key} to {choices(_nearest(_divisors(share), size)) if free else share}")
    rule = f"= {product} must {'divide' if free else 'be'} the number of devices, {num_devices}"
    mend = ", or ".join(mends) or f"{' and '.join(sizes)} so that they multiply to {num_devices}, or mesh.fsdp=-1"
    return [f"{' x '.join(f'{key}={size}' for key, size in sizes.items())} {rule}. Set {mend}."]


def fit_to_devices(config: RunConfig, num_devices: int) -> RunConfig:
    """The config with the mesh's -1 filled in.

    Args:
        config: a checked config.
        num_devices: devices of all processes together.

    Raises:
        ConfigError: the axes' product is not `num_devices`, or the batch or the model can't be divided by them.
    """
    if problems := check_devices(config.mesh, num_devices):
        raise ConfigError(problems)
    axes = _axes(config.mesh)
    left = num_devices // math.prod(size for size in axes.values() if size > 0)
    filled = {key.removeprefix("mesh."): left for key, size in axes.items() if size == -1}
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **filled))
    if problems := [*_batch(config), *_tensor(config)]:
        raise ConfigError(problems)
    return config


def _run(c: RunConfig) -> Iterator[str]:
    if c.run_name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", c.run_name):
        mend = re.sub(r"[/\\\x00-\x1f]+", "-", c.run_name).strip(".-") or "run"
        yield f"run_name={c.run_name!r} must be the name of one folder. Set run_name={mend}, and output_dir for where it is."
    if c.eval_interval and not c.eval.sets:
        mend = "Add eval.sets.NAME=DIR, or set eval_interval=0"
        yield f"eval_interval={c.eval_interval} needs an evaluation set, but eval.sets is empty. {mend}."
    if c.eval_interval and c.eval_steps == 0:
        mend = "Set eval_steps=-1 for every set whole, or eval_interval=0"
        yield f"eval_steps=0 would evaluate nothing, every eval_interval={c.eval_interval} steps. {mend}."
    if c.checkpoint.keep_every and not c.checkpoint_interval:
        mend = "Set checkpoint_interval, or checkpoint.keep_every=null"
        yield f"checkpoint.keep_every={c.checkpoint.keep_every} has nothing to keep with checkpoint_interval=0. {mend}."
    window = c.observe.profile_steps
    if window and not (len(window) == 2 and 0 <= window[0] <= window[1]):
        yield f"observe.profile_steps={list(window)} must be the first and the last step. Set for example 10,12."
    elif window and c.steps != "auto" and window[1] >= c.steps:
        yield f"observe.profile_steps={list(window)} must end before steps={c.steps}. Set its end to at most {c.steps - 1}."


def _directories(c: RunConfig) -> Iterator[str]:
    sources = {f"data.sources.{name}.path": source.path for name, source in c.data.sources.items()}
    sets = {f"eval.sets.{name}": path for name, path in c.eval.sets.items()}
    others = {"output_dir": c.output_dir, "checkpoint.init_from": c.checkpoint.init_from}
    for key, path in (sources | sets | others).items():
        if path == "":
            yield f'{key}="" is not a directory. Set {key} to one{"" if key in others else " made by `prepare`"}.'
    where = {key: os.path.abspath(os.path.expanduser(path)) for key, path in (sources | sets).items() if path}
    runs = os.path.abspath(os.path.expanduser(c.output_dir))
    for key, path in where.items():
        if path in (runs, os.path.join(runs, c.run_name)):
            place = f"output_dir={c.output_dir} with run_name={c.run_name}"
            yield f"{place} is the data directory {key}={(sources | sets)[key]}. Set output_dir to another one."
    for key, source in itertools.product(sets, sources):
        if key in where and where[key] == where.get(source):
            yield f"{key}={sets[key]} is also {source}, and trained text can't measure a model. Set {key} to held-out text."


def _sources(c: RunConfig) -> Iterator[str]:
    sources = c.data.sources
    if not sources:
        yield "data.sources is empty, but a run reads at least one. Add data.sources.NAME.path=DIR, made by `prepare`."
    elif not c.data.stages and not any(s.weight for s in sources.values()):
        weights = [f"data.sources.{name}.weight" for name in sources]
        yield f"{' + '.join(f'{w}=0' for w in weights)}: nothing would be drawn. Set {choices(weights)} above 0."
    elif not c.data.stages and c.steps == "auto" and all(s.epochs is None for s in sources.values() if s.weight):
        epochs = [f"data.sources.{name}.epochs" for name in sources]
        rule = f"steps=auto has no end, since {' and '.join(f'{e}=null' for e in epochs)}"
        yield f"{rule}. Set steps or {choices(epochs)} to a number."


def _stages(c: RunConfig) -> Iterator[str]:
    ends: dict[str, float] = {}
    for i, stage in enumerate(c.data.stages):
        key = f"data.stages[{i}]"
        for name, weight in stage.weights.items():
            if name not in c.data.sources:
                close = difflib.get_close_matches(name, c.data.sources, 1) or c.data.sources
                mend = f"Set it for {choices(close)}, or add data.sources.{name}.path=DIR"
                yield f"{key}.weights.{name} is not in data.sources. {mend}."
            if weight < 0:
                yield f"{key}.weights.{name}={weight} must be at least 0. Set it to 0, or leave it out."
        if not any(stage.weights.values()):
            yield f"{key}.weights sum to 0, so nothing would be drawn. Give one source a weight above 0."
        if stage.until is None:
            if i + 1 < len(c.data.stages):
                yield f"{key}.until=null, but only the last stage goes on to the end. Set it to where the stage ends."
            continue
        if stage.unit == "fraction" and (stage.until > 1 or c.steps == "auto"):
            yield f"{key}.until={stage.until} is a fraction of steps={c.steps}. Set until to at most 1, and steps to a number."
        if stage.until <= ends.get(stage.unit, 0):
            yield f"{key}.until={stage.until} must be more than the {ends[stage.unit]} before it. Set it higher, or reorder."
        ends[stage.unit] = stage.until


def _model(c: RunConfig) -> Iterator[str]:
    m = c.model
    if m.num_heads % m.num_kv_heads:
        mend = f"Set model.num_kv_heads to {choices(_nearest(_divisors(m.num_heads), m.num_kv_heads))}"
        yield f"model.num_kv_heads={m.num_kv_heads} must divide model.num_heads={m.num_heads}. {mend}."
    if m.head_dim is None and m.embed_dim % (2 * m.num_heads):
        mend = f"Set model.embed_dim to {choices(_multiples(m.embed_dim, 2 * m.num_heads))}, or model.head_dim"
        yield f"model.embed_dim={m.embed_dim} must be an even multiple of model.num_heads={m.num_heads} (rotary pairs). {mend}."
    if m.head_dim is not None and m.head_dim % 2:
        mend = f"Set model.head_dim to {choices(_multiples(m.head_dim, 2))}"
        yield f"model.head_dim={m.head_dim} must be even (rotary pairs). {mend}."
    if c.data.seq_length > m.max_length:
        mend = f"Set data.seq_length={m.max_length} or less, or model.max_length={c.data.seq_length}"
        yield f"data.seq_length={c.data.seq_length} must be at most model.max_length={m.max_length}. {mend}."
    low, high = m.rope_low_freq_factor, m.rope_high_freq_factor
    if m.rope_scaling == "llama3" and high <= low:
        mend = "Set them to 1 and 4, as Llama 3 does"
        yield f"model.rope_low_freq_factor={low} must be less than model.rope_high_freq_factor={high}. {mend}."


def _optimizer(c: RunConfig) -> Iterator[str]:
    o, warmup = c.optimizer, f"optimizer.warmup_steps={c.optimizer.warmup_steps}"
    if c.steps != "auto" and o.warmup_steps >= c.steps:
        yield f"{warmup} must be less than steps={c.steps}. Set optimizer.warmup_steps to at most {c.steps - 1}, or more steps."
    elif c.steps != "auto" and o.schedule == "wsd" and o.warmup_steps + o.decay_fraction * c.steps > c.steps:
        mend = f"Set optimizer.decay_fraction to at most {1 - o.warmup_steps / c.steps:.3g}"
        yield f"{warmup} and optimizer.decay_fraction={o.decay_fraction} are more than steps={c.steps} together. {mend}."
    if o.min_learning_rate > o.learning_rate:
        mend = f"Set for example optimizer.min_learning_rate={o.learning_rate / 10:.3g}"
        rule = f"must be at most optimizer.learning_rate={o.learning_rate}"
        yield f"optimizer.min_learning_rate={o.min_learning_rate} {rule}. {mend}."
    for key, value, usual in (("optimizer.beta1", o.beta1, 0.9), ("optimizer.beta2", o.beta2, 0.95)):
        if value >= 1:
            yield f"{key}={value} must be less than 1. Set for example {key}={usual}."


def _batch(c: RunConfig) -> Iterator[str]:
    rows, parts, shards = c.data.batch_size, c.optimizer.accumulation, c.mesh.data * c.mesh.fsdp
    if rows % parts:
        mend = f"Set data.batch_size to {choices(_multiples(rows, parts))}, or optimizer.accumulation to "
        valid = choices(_nearest(_divisors(rows), parts))
        yield f"data.batch_size={rows} must be divisible by optimizer.accumulation={parts}. {mend}{valid}."
        parts = 1
    if min(c.mesh.data, c.mesh.fsdp) < 1:  # not known yet, or wrong
        return
    by = f"mesh.data={c.mesh.data} times mesh.fsdp={c.mesh.fsdp}"
    if rows % (shards * parts):
        by_all = by + (f" times optimizer.accumulation={parts}" if parts > 1 else "")
        mend = f"Set data.batch_size to {choices(_multiples(rows, shards * parts))}"
        yield f"data.batch_size={rows} must be divisible by {by_all}. {mend}."
    if c.eval.batch_size is not None and c.eval.batch_size % shards:
        mend = f"Set eval.batch_size to {choices(_multiples(c.eval.batch_size, shards))}"
        yield f"eval.batch_size={c.eval.batch_size} must be divisible by {by}. {mend}."


def _mesh(c: RunConfig) -> Iterator[str]:
    mesh, axes = c.mesh, _axes(c.mesh)
    for key, size in axes.items():
        if size < 1 and size != -1:
            yield f"{key}={size} must be at least 1, or -1 for whatever is left. Set {key} to 1 or -1."
    free = [key for key, size in axes.items() if size == -1]
    if len(free) > 1:
        yield f"{' and '.join(f'{key}=-1' for key in free)}: only one axis can take what is left. Set {choices(free)} to 1."
    if mesh.simulated_devices and mesh.platform not in ("auto", "cpu"):
        mend = "Set mesh.platform=cpu, or mesh.simulated_devices=null"
        yield f"mesh.simulated_devices={mesh.simulated_devices} is not for mesh.platform={mesh.platform}. {mend}."
    if mesh.num_processes is not None and mesh.process_id is not None and mesh.process_id >= mesh.num_processes:
        mend = f"Set mesh.process_id to at most {mesh.num_processes - 1}; it counts from 0"
        yield f"mesh.process_id={mesh.process_id} must be less than mesh.num_processes={mesh.num_processes}. {mend}."
    if mesh.coordinator is not None and not re.fullmatch(r".+:\d+", mesh.coordinator):
        yield f"mesh.coordinator={show(mesh.coordinator)} must be host:port. Set for example mesh.coordinator=10.0.0.1:8476."


def _tensor(c: RunConfig) -> Iterator[str]:
    names = ("num_heads", "num_kv_heads", "mlp_dim", "vocab_size")
    dims = {f"model.{name}": size for name in names if (size := getattr(c.model, name)) is not None}
    wrong = [f"{key}={size}" for key, size in dims.items() if c.mesh.tensor > 1 and size % c.mesh.tensor]
    if wrong:
        valid = choices(_nearest(_divisors(math.gcd(*dims.values())), c.mesh.tensor))
        yield f"mesh.tensor={c.mesh.tensor} must divide {' and '.join(wrong)} (split over tensor). Set mesh.tensor to {valid}."


def _axes(mesh: MeshConfig) -> dict[str, int]:
    return {"mesh.data": mesh.data, "mesh.fsdp": mesh.fsdp, "mesh.tensor": mesh.tensor}


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _nearest(values: Iterable[int], wanted: int, count: int = 4) -> list[int]:
    return sorted(sorted(values, key=lambda v: (abs(v - wanted), v))[:count])


def _multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to a value."""
    below = value // unit * unit
    return [m for m in (below, below + unit) if m]
