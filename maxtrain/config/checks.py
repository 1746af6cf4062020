"""What must hold across keys and needs neither device nor data; problems are gathered, never raised
one by one.

A rule yields messages with the values, the rule and the mend; or an `Idle`, for a key that was set
and that nothing reads. What depends on the data, as sources and stages do, is checked when its plan
is solved (data_pipeline/plan.py).
"""

import contextlib
import dataclasses
import math
import operator
import os
import re
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.config import Interval
from data_pipeline.errors import ConfigError
from data_pipeline.remote import is_url
from maxtrain.config.kernels import ATTENTION
from maxtrain.config.keys import choices, show
from maxtrain.config.paths import path_problems
from maxtrain.config.schema import ANOMALIES, MeshConfig, RunConfig, ScheduleConfig

_LIMITS = (
    ("low", operator.lt, "at least"),
    ("above", operator.le, "more than"),
    ("high", operator.gt, "at most"),
)
_INT32_MAX = 2**31 - 1
_FLOAT32_MIN, _FLOAT32_MAX = (
    2.0**-126,
    (2 - 2.0**-23) * 2.0**127,
)  # smaller ones are flushed to 0 on most devices


class Idle(NamedTuple):
    """A key that was set although nothing reads it. An error or a note, as load.py decides; `str`
    is the error."""

    key: str
    value: Any
    cause: str  # the key and value that leave it without a reader
    problem: str

    def __str__(self) -> str:
        return self.problem


Problem = str | Idle


def out_of_range(path: str, value: Any, limits: Mapping[str, Any]) -> str | None:
    """The problem with a value outside its key's limits, None if it is inside or not a number.

    Numbers end on devices as float32 and int32, so what these don't hold is outside, where the key
    has no limit of its own.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    for name, outside, words in _LIMITS:
        if limits[name] is not None and outside(value, limits[name]):
            return f"{path}={value} must be {words} {limits[name]}. Set {path} to {words} {limits[name]}."
    if isinstance(value, int) and limits["high"] is None and value > _INT32_MAX:
        return f"{path}={value} must be at most {_INT32_MAX} (int32). Set {path} to at most {_INT32_MAX}."
    if isinstance(value, float) and abs(value) > _FLOAT32_MAX:
        return f"{path}={value} must be at most {_FLOAT32_MAX:.4g} (float32). Set {path} to at most {_FLOAT32_MAX:.4g}."
    if isinstance(value, float) and 0 < abs(value) < _FLOAT32_MIN:
        zero = "" if limits["above"] == 0 else "0 or "
        rule = f"{zero}at least {_FLOAT32_MIN:.4g}"
        return f"{path}={value} must be {rule}: float32 makes 0 of what is smaller. Set {path} to {rule}."
    return None


def problems_across(config: RunConfig) -> list[Problem]:
    """Every cross-field problem of a config whose values are inside their own types and ranges."""
    rules = (
        path_problems,
        _run,
        _model,
        _kernel,
        _init,
        _copies,
        _loss,
        _unread,
        _regularization,
        _optimizer,
        _anomaly,
        _schedule,
        _loss_scale,
        _mesh,
        _parts,
        _integrity,
    )
    return [problem for rule in rules for problem in rule(config)]


def fit_to_devices(config: RunConfig, num_devices: int) -> RunConfig:
    """A checked config with the mesh's -1 filled in, for `num_devices` devices of all processes
    together.

    Raises:
        ConfigError: the axes' product is not `num_devices`, or the batch or the model can't be
            divided by them.
    """
    axes = _axes(config.mesh)
    sizes = {key: size for key, size in axes.items() if size > 0}
    product, free = math.prod(sizes.values()), [key for key in axes if key not in sizes]
    if num_devices % product or not (free or product == num_devices):
        shares = {
            key: num_devices * size / product for key, size in sizes.items()
        }  # changing one axis alone may be enough
        whole = {key: int(share) for key, share in shares.items() if share % 1 == 0}
        mends = [
            f"{key} to {_near(sizes[key], _divisors(share)) if free else share}"
            for key, share in whole.items()
        ]
        rule = f"= {product} must {'divide' if free else 'be'} the number of devices, {num_devices}"
        mend = (
            ", or ".join(mends)
            or f"{' and '.join(sizes)} so that they multiply to {num_devices}, or mesh.fsdp=-1"
        )
        raise ConfigError(
            f"{' x '.join(f'{key}={size}' for key, size in sizes.items())} {rule}. Set {mend}."
        )
    filled = {key.removeprefix("mesh."): num_devices // product for key in free}
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **filled))
    if problems := list(_parts(config)):
        raise ConfigError(problems)
    return config


def fit_to_fewer(config: RunConfig, had: int, count: int, devices: int) -> RunConfig | None:
    """The config for `count` of the `had` processes it is meant for, of so many devices each; None:
    it can't do with so few.

    Accumulation grows, so that no device gets more rows at a time than it had; the batch of a step
    stays as it is.
    """
    for accumulation in range(
        -(-config.optimizer.accumulation * had // count), config.data.batch_size + 1
    ):
        fewer = dataclasses.replace(
            config, optimizer=dataclasses.replace(config.optimizer, accumulation=accumulation)
        )
        with contextlib.suppress(ConfigError):
            fit_to_devices(fewer, count * devices)
            return fewer
    return None


def _run(c: RunConfig) -> Iterator[Problem]:
    if c.run_name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", c.run_name):
        yield f"run_name={c.run_name!r} must be the name of one folder. Set run_name=NAME, and output_dir for where it is."
    if len(c.run_name.encode()) > 200:
        yield f"run_name={show(c.run_name)} must be the name of a folder, at most 200 bytes. Set run_name to a shorter one."
    if c.eval_interval and not c.eval.sets:
        mend = "Add eval.sets.NAME.path=DIR, or set eval_interval=0"
        problem = f"eval_interval={c.eval_interval} needs an evaluation set, but eval.sets is empty. {mend}."
        yield Idle("eval_interval", c.eval_interval, "eval.sets={}", problem)
    if c.eval_interval and c.eval_steps == 0 and any(s.steps is None for s in c.eval.sets.values()):
        mend = "Set eval_steps=-1 for every set whole, or eval_interval=0"
        yield f"eval_steps=0 would evaluate nothing, every eval_interval={_interval(c.eval_interval)}. {mend}."
    yield from _stop(c)
    yield from _without_prompts_and_sets(c)
    for name, held_out in c.eval.sets.items():
        if held_out.steps == 0:
            yield f"eval.sets.{name}.steps=0 would evaluate nothing. Set it to -1 for the whole set, or leave the set out."
    if not c.data.sources:
        yield "data.sources is empty, but a run reads at least one. Add data.sources.NAME.path=DIR, made by `prepare`."
    sources = {f"data.sources.{name}.path": source.path for name, source in c.data.sources.items()}
    held_out = {f"eval.sets.{name}.path": held_out.path for name, held_out in c.eval.sets.items()}
    runs = os.path.abspath(c.output_dir)
    for key, path in (sources | held_out).items():
        if (
            path
            and not is_url(path)
            and os.path.abspath(path) in (runs, os.path.join(runs, c.run_name))
        ):
            place = f"output_dir={c.output_dir} with run_name={c.run_name}"
            yield f"{place} is the data directory {key}={path}. Set output_dir to another one."
    seen: dict[str, str] = {}
    for key, path in sources.items():
        where = (
            path.rstrip("/")
            if is_url(path)
            else os.path.realpath(path)
            if "\0" not in path
            else path
        )
        first = seen.setdefault(where, key)
        if path and first != key:
            mend = f"Keep one of them, with the sum of both weights, or set {key} to other data"
            yield f"{key}={path} is the directory of {first} too, and would be read twice in the same order. {mend}."
    sets: dict[str, str] = {}
    for name, held_out_set in c.eval.sets.items():
        first = sets.setdefault(str(held_out_set), name)
        if held_out_set.path and first != name:
            rule = f"is eval.sets.{first} once more, with the same interval, steps and batch_size"
            yield f"eval.sets.{name}.path={held_out_set.path} {rule}. Leave one of them out."


def _without_prompts_and_sets(c: RunConfig) -> Iterator[Problem]:
    """Keys that say when something is done which there is nothing to do with."""
    if c.observe.sample_interval and not c.observe.prompts:
        key = f"observe.sample_interval={c.observe.sample_interval}"
        problem = f"{key} needs prompts, but observe.prompts is empty. Set observe.prompts='[Once upon a time]', or leave it out."
        yield Idle(
            "observe.sample_interval", c.observe.sample_interval, "observe.prompts=[]", problem
        )
    if c.eval_at_start and not c.eval.sets:
        problem = "eval_at_start=true needs an evaluation set, but eval.sets is empty. Add eval.sets.NAME.path=DIR, or leave it out."
        yield Idle("eval_at_start", c.eval_at_start, "eval.sets={}", problem)


def _interval(interval: Interval) -> str:
    return f"{interval} steps" if isinstance(interval, int) else interval


def _stop(c: RunConfig) -> Iterator[Problem]:
    """What ends a run whose evaluations get no better."""
    patience, named = c.eval.stop_patience, c.eval.stop_set
    if patience is None:
        if named is not None:
            problem = f"eval.stop_set={named} is not used without eval.stop_patience. Set eval.stop_patience=3, or leave it out."
            yield Idle("eval.stop_set", named, "eval.stop_patience=null", problem)
        return
    key = f"eval.stop_patience={patience}"
    if not c.eval.sets:
        problem = f"{key} needs an evaluation set, but eval.sets is empty. Add eval.sets.NAME.path=DIR, or leave it out."
        yield Idle("eval.stop_patience", patience, "eval.sets={}", problem)
        return
    name = named or next(iter(c.eval.sets))
    if name not in c.eval.sets:
        yield f"eval.stop_set={name} must be one of eval.sets: {choices(c.eval.sets)}. Set eval.stop_set to one of these."
        return
    own = c.eval.sets[name].interval
    if not (c.eval_interval if own is None else own):
        rule = (
            f"looks at the evaluations of eval.sets.{name}, of which there are none while training"
        )
        yield f"{key} {rule}. Set eval_interval=100, for example, or leave it out."


def _integrity(c: RunConfig) -> Iterator[str]:
    if c.integrity.repeat_interval and c.determinism != "full":
        rule = f"integrity.repeat_interval={c.integrity.repeat_interval} needs programs that repeat bit for bit"
        yield f"{rule}, which determinism={c.determinism} does not promise. Set determinism=full, or leave it out."


def _model(c: RunConfig) -> Iterator[str]:
    m = c.model
    if m.num_heads % m.num_kv_heads:
        mend = f"Set model.num_kv_heads to {_near(m.num_kv_heads, _divisors(m.num_heads))}"
        yield f"model.num_kv_heads={m.num_kv_heads} must divide model.num_heads={m.num_heads}. {mend}."
    if m.head_dim is None and m.embed_dim % (2 * m.num_heads):
        mend = (
            f"Set model.embed_dim to {_multiples(m.embed_dim, 2 * m.num_heads)}, or model.head_dim"
        )
        yield f"model.embed_dim={m.embed_dim} must be an even multiple of model.num_heads={m.num_heads} (rotary pairs). {mend}."
    if m.head_dim is not None and m.head_dim % 2:
        mend = f"Set model.head_dim to {_multiples(m.head_dim, 2)}"
        yield f"model.head_dim={m.head_dim} must be even (rotary pairs). {mend}."
    for key, length in _lengths(c).items():
        if length > m.max_length:
            mend = f"Set {key}={m.max_length} or less, or model.max_length={length}"
            yield f"{key}={length} must be at most model.max_length={m.max_length}. {mend}."


def _lengths(c: RunConfig) -> dict[str, int]:
    """Every length of rows, by its key."""
    lengths = {"data.seq_length": c.data.seq_length}
    lengths |= {
        f"data.stages[{i}].seq_length": stage.seq_length
        for i, stage in enumerate(c.data.stages)
        if stage.seq_length
    }
    return lengths | ({"eval.seq_length": c.eval.seq_length} if c.eval.seq_length else {})


def _kernel(c: RunConfig) -> Iterator[str]:
    name, kernel, compute = (
        f"model.attention={c.model.attention}",
        ATTENTION[c.model.attention],
        c.precision.compute,
    )
    if c.determinism == "full" and not kernel.repeats:
        others = choices(
            other for other, can in ATTENTION.items() if can.repeats and not can.platform
        )
        mend = f"Set model.attention to {others}, or determinism=seeded"
        yield f"{name} may add in another order each time in its backward pass, and determinism=full allows no such. {mend}."
    if not (kernel.segments or c.data.attend_across_documents or c.data.packing == "pad"):
        rule = f"does not keep the documents of a row apart, and data.packing={c.data.packing} puts several into one"
        yield f"{name} {rule}. Set data.packing=pad, data.attend_across_documents=true to let it, or model.attention=xla."
    if compute not in kernel.dtypes:
        mend = f"Set precision.compute to {choices(kernel.dtypes)}, or model.attention=xla"
        yield f"{name} does not multiply precision.compute={compute}. {mend}."
    for key, length in _lengths(c).items():
        if length % kernel.rows:
            mend = f"Set {key} to {_multiples(length, kernel.rows)}, or model.attention=xla"
            yield f"{name} needs rows of a multiple of {kernel.rows} tokens, and {key} is {length}. {mend}."
    size = c.model.head_dim or c.model.embed_dim // c.model.num_heads
    if kernel.head_dim and (size > kernel.head_dim[0] or size % kernel.head_dim[1]):
        rule = f"needs heads of at most {kernel.head_dim[0]}, a multiple of {kernel.head_dim[1]}"
        yield f"{name} {rule}, and model.head_dim is {size}. Set model.head_dim=64, for example, or model.attention=xla."


def _copies(c: RunConfig) -> Iterator[Problem]:
    to = c.checkpoint.copy_to
    if to is None:
        for name, value in _changed(c.checkpoint, "copy_keep"):
            mend = "Set checkpoint.copy_to, or leave it out"
            problem = f"checkpoint.{name}={value} is not used without checkpoint.copy_to. {mend}."
            yield Idle(f"checkpoint.{name}", value, "checkpoint.copy_to=null", problem)
    elif (
        not is_url(to)
        and "\0" not in to + c.output_dir
        and Path(to).resolve() == Path(c.output_dir).resolve()
    ):
        yield f"checkpoint.copy_to={to} is output_dir itself. Set checkpoint.copy_to to a directory on another disk."


def _init(c: RunConfig) -> Iterator[Problem]:
    init = c.init
    fixed = init.name in ("truncated_normal", "normal")
    if fixed and init.std is None:
        yield f"init.name={init.name} needs init.std=null to be a number. Set init.std=0.02, for example."
    if not fixed and init.std is not None:
        mend = "Set init.name=truncated_normal or normal, or init.std=null"
        problem = (
            f"init.std={init.std} is not used by init.name={init.name}, which counts fans. {mend}."
        )
        yield Idle("init.std", init.std, f"init.name={init.name}", problem)
    if c.checkpoint.init_from is None and c.checkpoint.init_partial:
        partial = show(c.checkpoint.init_partial)
        mend = "Set checkpoint.init_from, or leave it out"
        problem = (
            f"checkpoint.init_partial={partial} is not used without checkpoint.init_from. {mend}."
        )
        yield Idle(
            "checkpoint.init_partial",
            c.checkpoint.init_partial,
            "checkpoint.init_from=null",
            problem,
        )
    if c.checkpoint.init_from is not None and not c.checkpoint.init_partial:
        cause = f"checkpoint.init_from={c.checkpoint.init_from}"
        for name, value in _changed(
            init, "name", "std", "residual", "embedding_std", "scale", "seed"
        ):
            mend = "Set checkpoint.init_from=null, or leave it out"
            yield Idle(
                f"init.{name}",
                value,
                cause,
                f"init.{name}={show(value)} is not used with {cause}. {mend}.",
            )
    bases = {
        "init.mup_base_head_dim": init.mup_base_head_dim,
        "init.mup_base_depth": init.mup_base_depth,
    }
    for key, value in bases.items():
        if value is not None and init.mup_base_width is None:
            mend = f"Set init.mup_base_width={c.model.embed_dim}, or {key}=null"
            problem = f"{key}={value} needs init.mup_base_width. {mend}."
            yield Idle(key, value, "init.mup_base_width=null", problem)
    name = c.optimizer.name
    if (
        init.mup_base_width is not None
        and init.mup_base_depth is not None
        and name in ("sgd", "momentum", "nesterov")
    ):
        mend = "Set optimizer.name=adamw, adam or lion, or init.mup_base_depth=null"
        yield f"init.mup_base_depth={init.mup_base_depth} has no rule for optimizer.name={name}. {mend}."


def _loss(c: RunConfig) -> Iterator[str]:
    if (
        c.optimizer.normalize == "sequences"
        and c.data.attend_across_documents
        and c.data.packing != "pad"
    ):
        rule = "is a mean over documents, and data.attend_across_documents=true makes one of all documents in a row"
        mend = "Set data.attend_across_documents=false, or optimizer.normalize=tokens"
        yield f"optimizer.normalize=sequences {rule}. {mend}."


def _unread(c: RunConfig) -> Iterator[Idle]:
    """Keys that another one, at this value, leaves without a reader."""
    d, rope = (
        c.data,
        ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length"),
    )
    for prefix, section, names, key, off, mend in (
        ("loss.", c.loss, ("adversarial_radius", "adversarial_steps"), "loss.adversarial", 0.0, 1),
        ("model.", c.model, rope, "model.rope_scaling", "none", "llama3"),
        ("data.corruption.", d.corruption, ("span", "token_id"), "data.corruption.rate", 0.0, 0.15),
        ("data.", d, ("fill_patience",), "data.min_fill", 0.0, 0.5),
        ("data.", d, ("on_long",), "data.packing", "stream", "bins"),
    ):
        if getattr(section, key.rpartition(".")[2]) != off:
            continue
        for name, value in _changed(section, *names):
            problem = f"{prefix}{name}={show(value)} is not used with {key}={off}. Set {key}={mend}, or leave it out."
            yield Idle(f"{prefix}{name}", value, f"{key}={off}", problem)


def _regularization(c: RunConfig) -> Iterator[str]:
    r = c.regularization
    for name in ("attention_dropout", "residual_dropout", "embedding_dropout", "stochastic_depth"):
        rate = getattr(r, name)
        if _float32(rate) >= 1:
            yield f"regularization.{name}={rate} must be less than 1. Set regularization.{name}=0.1, for example."
    if r.attention_dropout and c.model.attention != "eager":
        rule = f"needs an attention kernel that can drop weights, and model.attention={c.model.attention} can't"
        yield f"regularization.attention_dropout={r.attention_dropout} {rule}. Set model.attention=eager, or the rate to 0."


def _optimizer(c: RunConfig) -> Iterator[Problem]:
    o = c.optimizer
    for name, usual in (("beta1", 0.9), ("beta2", 0.95), ("momentum", 0.95), ("ema_decay", 0.999)):
        value = getattr(o, name)
        if value is not None and _float32(value) >= 1:
            yield f"optimizer.{name}={value} must be less than 1. Set for example optimizer.{name}={usual}."
    betas, roots = "adamw adam lion muon", "adamw adam muon"
    yield from _only(
        "optimizer.",
        o,
        o.name,
        {"momentum": "momentum nesterov muon", "beta1": betas, "beta2": betas, "eps": roots},
    )
    patterns = [("optimizer.no_decay", pattern) for pattern in o.no_decay]
    patterns += [("checkpoint.init_partial", pattern) for pattern in c.checkpoint.init_partial]
    patterns += [
        (f"optimizer.groups.{name}.pattern", group.pattern) for name, group in o.groups.items()
    ]
    for key, pattern in patterns:
        if error := _not_a_pattern(pattern):
            mend = f"Set {key} to part of a path, such as attention, with special characters after a backslash"
            yield f"{key}={pattern} must be a regular expression, but: {error}. {mend}."
    for name, group in o.groups.items():
        if not group.pattern:
            mend = f"Set optimizer.groups.{name}.pattern=attention, for example, or =. for all parameters"
            yield f"optimizer.groups.{name}.pattern is empty, and would choose all parameters. {mend}."
    if c.precision.params == "bfloat16" and o.name in betas.split() and 1 - o.beta2 < 2**-8:
        rule = "changes a moment by less than half a step of precision.params=bfloat16, so it would stay as it is"
        yield f"optimizer.beta2={o.beta2} {rule}. Set optimizer.beta2=0.95, or precision.params=float32."
    if o.stochastic_rounding and c.precision.params != "bfloat16":
        mend = "Set precision.params=bfloat16, or optimizer.stochastic_rounding=false"
        cause = f"precision.params={c.precision.params}"
        problem = (
            f"optimizer.stochastic_rounding=true is for bfloat16 weights, not {cause}. {mend}."
        )
        yield Idle("optimizer.stochastic_rounding", True, cause, problem)
    if c.init.mup_base_width is not None and o.name in ("adafactor", "muon"):
        rule = "muP has the rates of Adam, Lion and SGD"
        mend = "Set optimizer.name=adamw, adam, lion, sgd, momentum or nesterov, or init.mup_base_width=null"
        yield f"optimizer.name={o.name} is not for init.mup_base_width={c.init.mup_base_width}: {rule}. {mend}."
    if o.zero and c.mesh.data == 1:
        mend = "Set mesh.data=-1 and mesh.fsdp=1, for example, or optimizer.zero=0"
        problem = f"optimizer.zero={o.zero} splits over mesh.data, which is 1. {mend}."
        yield Idle("optimizer.zero", o.zero, "mesh.data=1", problem)


def _not_a_pattern(text: str) -> str:
    """Why a text is no regular expression, or one that a later Python will read otherwise; empty if
    it is a sound one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            re.compile(text)
    except (re.error, FutureWarning, RecursionError, OverflowError) as error:
        return str(error) or type(error).__name__
    return ""


def _schedule(c: RunConfig) -> Iterator[Problem]:
    s, peak, warmup = (
        c.schedule,
        c.optimizer.learning_rate,
        f"schedule.warmup_steps={c.schedule.warmup_steps}",
    )
    to_the_minimum = "linear cosine exponential inverse_sqrt polynomial wsd"
    lowest = dict.fromkeys(("min_lr_ratio", "min_learning_rate"), to_the_minimum)
    owners = lowest | {"decay_fraction": "wsd", "power": "polynomial", "pieces": "pieces"}
    yield from _only("schedule.", s, s.name, owners)
    if c.steps != "auto" and s.warmup_steps >= c.steps:
        yield f"{warmup} must be less than steps={c.steps}. Set schedule.warmup_steps to at most {c.steps - 1}, or more steps."
    elif (
        c.steps != "auto"
        and s.name == "wsd"
        and s.warmup_steps + s.decay_fraction * c.steps > c.steps
    ):
        mend = f"Set schedule.decay_fraction to at most {1 - s.warmup_steps / c.steps:.3g}"
        yield f"{warmup} and schedule.decay_fraction={s.decay_fraction} are more than steps={c.steps} together. {mend}."
    elif c.steps != "auto" and s.name == "pieces" and s.pieces:
        try:
            piece_borders(s, c.steps)
        except ConfigError as error:
            yield from error.problems
    if s.name in to_the_minimum.split() and s.min_learning_rate is not None:
        own = f"schedule.min_learning_rate={s.min_learning_rate}"
        if s.min_learning_rate > peak:
            mend = "Set schedule.min_learning_rate=null, for the share of the peak that schedule.min_lr_ratio says"
            yield f"{own} must be at most optimizer.learning_rate={peak}. {mend}."
        for name, value in _changed(s, "min_lr_ratio"):
            mend = "Set schedule.min_learning_rate=null, or leave it out"
            problem = (
                f"schedule.{name}={value} is not used with {own}, which is the rate itself. {mend}."
            )
            yield Idle(f"schedule.{name}", value, own, problem)
    pieces = s.pieces if s.name == "pieces" else ()
    names = {s.name} | {piece.name for piece in pieces}
    if s.timescale is not None and "inverse_sqrt" not in names:
        mend = "Set schedule.name=inverse_sqrt, or leave it out"
        problem = f"schedule.timescale={s.timescale} is for inverse_sqrt, not for schedule.name={s.name}. {mend}."
        yield Idle("schedule.timescale", s.timescale, f"schedule.name={s.name}", problem)
    if s.name == "pieces" and not s.pieces:
        mend = "Set for example 'schedule.pieces=[{name: constant, until: 0.8, unit: fraction}, {name: linear}]'"
        yield f"schedule.name=pieces needs at least one piece, but schedule.pieces is empty. {mend}."
    for i, piece in enumerate(pieces):
        yield from _only(f"schedule.pieces[{i}].", piece, piece.name, {"power": "polynomial"})
        if piece.name == "constant" and piece.end:
            mend = f"Set schedule.pieces[{i}].name=linear, or leave it out"
            key = f"schedule.pieces[{i}].end"
            problem = (
                f"{key}={piece.end} is not for a constant piece, which ends as it starts. {mend}."
            )
            yield Idle(key, piece.end, f"schedule.pieces[{i}].name=constant", problem)


def fit_warmup(config: RunConfig, num_steps: int) -> RunConfig:
    """The config with a warm-up that a run of so many steps has room for: its own, or a tenth of
    them if that does not fit.

    Unchanged if not even that fits, which the checks then say.
    """
    if warmup_fits(config.schedule, num_steps):
        return config
    tenth = min(max(1, num_steps // 10), num_steps - 1)
    shorter = dataclasses.replace(config.schedule, warmup_steps=tenth)
    if tenth > config.schedule.warmup_steps or not warmup_fits(shorter, num_steps):
        return config
    return dataclasses.replace(config, schedule=shorter)


def warmup_fits(schedule: ScheduleConfig, num_steps: int) -> bool:
    """Whether warm-up leaves room for what follows it."""
    if schedule.warmup_steps >= num_steps:
        return False
    if schedule.name == "wsd":
        return schedule.warmup_steps + schedule.decay_fraction * num_steps <= num_steps
    if schedule.name == "pieces" and schedule.pieces:
        try:
            piece_borders(schedule, num_steps)
        except ConfigError:
            return False
    return True


def piece_borders(schedule: ScheduleConfig, num_steps: int) -> list[int]:
    """The index of the first update of each piece after warm-up, and `num_steps`, which the last
    piece ends with.

    Raises:
        ConfigError: a piece without updates, or a last one that ends before the run.
    """
    warmup = min(schedule.warmup_steps, num_steps)
    units = {"steps": 1, "fraction": num_steps}
    ends = [None if p.until is None else round(p.until * units[p.unit]) for p in schedule.pieces]
    if ends[-1] is not None:
        last = len(ends) - 1
        raise ConfigError(
            f"schedule.pieces[{last}].until={schedule.pieces[last].until} would end the last piece, which lasts until the run "
            f"ends. Add a piece after it, such as {{name: constant}}, or leave it out."
        )
    borders = [warmup]
    for i, (piece, end) in enumerate(zip(schedule.pieces, [*ends[:-1], num_steps])):
        if end is None:
            raise ConfigError(
                f"schedule.pieces[{i}].until is null, but a piece follows. Set schedule.pieces[{i}].until=STEPS."
            )
        if not borders[-1] < end <= num_steps - (i < len(ends) - 1):
            before = (
                f"schedule.pieces[{i - 1}]" if i else f"warm-up (schedule.warmup_steps={warmup})"
            )
            name = f"schedule.pieces[{i}]" + (
                f".until={piece.until}" if piece.until is not None else ""
            )
            rule = (
                f"ends at step {end:,}, but must end after {before}, which ends at {borders[-1]:,}"
            )
            mend = "Set the ends of the pieces so that each has updates"
            raise ConfigError(
                f"{name} {rule}, and leave room for those behind it in the {num_steps:,} steps. {mend}."
            )
        borders.append(end)
    return borders


def _changed(section: Any, *names: str) -> list[tuple[str, Any]]:
    """Those of these keys that are not at their defaults, with their values."""
    default = type(section)()
    return [
        (name, value)
        for name in names
        if (value := getattr(section, name)) != getattr(default, name)
    ]


def _only(prefix: str, section: Any, name: str, owners: Mapping[str, str]) -> Iterator[Idle]:
    """Keys that were set although only the choices named in `owners` (separated by blanks) read
    them."""
    for key, value in _changed(section, *owners):
        if name not in (owner := owners[key]).split():
            default = f"{prefix}{key}={show(getattr(type(section)(), key))}"
            mend = f"Set {prefix}name={choices(owner.split())}, or leave it out ({default})"
            problem = f"{prefix}{key}={show(value)} is for {choices(owner.split())}, not for {prefix}name={name}. {mend}."
            yield Idle(f"{prefix}{key}", value, f"{prefix}name={name}", problem)


def _float32(value: float) -> float:
    """The number that a device sees."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _loss_scale(c: RunConfig) -> Iterator[Problem]:
    s, auto = c.loss_scale, "dynamic" if c.precision.compute == "float16" else "none"
    mode = auto if s.mode == "auto" else s.mode
    for name, value in _changed(
        s, "initial", "window", "factor", "backoff", "hysteresis", "min", "max"
    ):
        if mode == "none" or (mode == "static" and name != "initial"):
            cause = f"loss_scale.mode={s.mode} with precision.compute={c.precision.compute}"
            problem = f"loss_scale.{name}={value:g} is not used by {cause}. Set loss_scale.mode=dynamic, or leave it out."
            yield Idle(f"loss_scale.{name}", value, cause, problem)
    if mode == "dynamic" and not s.min <= s.initial <= s.max:
        rule = f"must be between loss_scale.min={s.min:g} and loss_scale.max={s.max:g}"
        yield f"loss_scale.initial={s.initial:g} {rule}. Set it in between, or loss_scale.mode=static."
    if mode == "dynamic" and s.backoff >= 1:
        yield f"loss_scale.backoff={s.backoff:g} must be less than 1. Set for example loss_scale.backoff=0.5."


def _anomaly(c: RunConfig) -> Iterator[Problem]:
    a = c.anomaly
    limits = {
        "loss_limit": "loss_spike",
        "grad_limit": "grad_spike",
        "drift_limit": "weight_drift",
        "dead_steps": "dead",
    }
    limits |= {"diverging_limit": "diverging", "patience": "loss_spike grad_spike"}
    for name, value in _changed(a, *limits):
        kinds = limits[name].split()
        if all(getattr(a, kind) == "off" for kind in kinds):
            off = " and ".join(f"anomaly.{kind}=off" for kind in kinds)
            problem = f"anomaly.{name}={value} is not used by {off}. Set anomaly.{kinds[0]}=warn, or leave it out."
            yield Idle(f"anomaly.{name}", value, off, problem)
    if a.non_finite != "skip":
        for name, value in _changed(a, "max_skipped"):
            cause = f"anomaly.non_finite={a.non_finite}"
            mend = "Set anomaly.non_finite=skip, or leave it out"
            yield Idle(
                f"anomaly.{name}",
                value,
                cause,
                f"anomaly.{name}={value} is not used by {cause}. {mend}.",
            )
    if "rollback" not in (*(getattr(a, kind) for kind in ANOMALIES), c.data.repeated):
        for name, value in _changed(
            a, "leave_out", *(() if c.data.repeated == "skip" else ("max_rollbacks",))
        ):
            mend = "Set anomaly.loss_spike=rollback, for example, or leave it out"
            problem = (
                f"anomaly.{name}={value} is for the policy rollback, which no anomaly has. {mend}."
            )
            yield Idle(f"anomaly.{name}", value, "no policy rollback", problem)
    if a.min_steps > a.window:
        mend = f"Set anomaly.min_steps to at most {a.window}, or anomaly.window to at least {a.min_steps}"
        yield f"anomaly.min_steps={a.min_steps} must be at most anomaly.window={a.window}, which it fills. {mend}."


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
    if (mesh.min_processes or 0) > (mesh.num_processes or math.inf):
        mend = f"Set mesh.min_processes to at most {mesh.num_processes}"
        yield f"mesh.min_processes={mesh.min_processes} is more than mesh.num_processes={mesh.num_processes}. {mend}."
    if (
        mesh.num_processes is not None
        and mesh.process_id is not None
        and mesh.process_id >= mesh.num_processes
    ):
        mend = f"Set mesh.process_id to at most {mesh.num_processes - 1}; it counts from 0"
        yield f"mesh.process_id={mesh.process_id} must be less than mesh.num_processes={mesh.num_processes}. {mend}."


def _parts(c: RunConfig) -> Iterator[str]:
    """What the batch and the model are divided into; an axis that is not known yet divides
    nothing."""
    parts, shards = c.optimizer.accumulation, c.mesh.data * c.mesh.fsdp
    by = f"mesh.data={c.mesh.data} times mesh.fsdp={c.mesh.fsdp}"
    sizes = {"data.batch_size": c.data.batch_size}
    sizes |= {
        f"data.stages[{i}].batch_size": stage.batch_size
        for i, stage in enumerate(c.data.stages)
        if stage.batch_size
    }
    for key, rows in sizes.items():
        if rows % parts:
            mend = f"Set {key} to {_multiples(rows, parts)}, or optimizer.accumulation to {_near(parts, _divisors(rows))}"
            yield f"{key}={rows} must be divisible by optimizer.accumulation={parts}. {mend}."
        unit = shards * (1 if rows % parts else parts)
        if min(c.mesh.data, c.mesh.fsdp) > 0 and rows % unit:
            by_all = by + (f" times optimizer.accumulation={parts}" if unit > shards else "")
            yield f"{key}={rows} must be divisible by {by_all}. Set {key} to {_multiples(rows, unit)}."
    held_out = {"eval.batch_size": c.eval.batch_size}
    held_out |= {f"eval.sets.{name}.batch_size": s.batch_size for name, s in c.eval.sets.items()}
    for key, rows in held_out.items():
        if min(c.mesh.data, c.mesh.fsdp) > 0 and rows and rows % shards:
            yield f"{key}={rows} must be divisible by {by}. Set {key} to {_multiples(rows, shards)}."
    names = ("num_heads", "num_kv_heads", "mlp_dim", "vocab_size")
    dims = {f"model.{name}": size for name in names if (size := getattr(c.model, name)) is not None}
    wrong = [
        f"{key}={size}" for key, size in dims.items() if c.mesh.tensor > 1 and size % c.mesh.tensor
    ]
    if wrong:
        valid = _near(c.mesh.tensor, _divisors(math.gcd(*dims.values())))
        yield f"mesh.tensor={c.mesh.tensor} must divide {' and '.join(wrong)} (split over tensor). Set mesh.tensor to {valid}."


def _axes(mesh: MeshConfig) -> dict[str, int]:
    return {"mesh.data": mesh.data, "mesh.fsdp": mesh.fsdp, "mesh.tensor": mesh.tensor}


def _divisors(n: int) -> list[int]:
    """Those worth suggesting."""
    return [d for d in range(1, min(n, 4096) + 1) if n % d == 0]


def _near(wanted: int, valid: Iterable[int]) -> str:
    """Up to four valid values, the nearest to the wanted one."""
    return choices(sorted(sorted(valid, key=lambda v: abs(v - wanted))[:4]))


def _multiples(wanted: int, unit: int) -> str:
    """The multiples next to the wanted value."""
    below = wanted // unit * unit
    return choices(m for m in (below, below + unit) if m)
