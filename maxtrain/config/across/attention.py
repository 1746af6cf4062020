"""Limits of each attention kernel, checked against the data, the precision and the other
settings.
"""

from collections.abc import Iterator

from maxtrain.config.across.rows import row_lengths
from maxtrain.config.kernels import ATTENTION, AUTO
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.dpo import UNPAIRED
from maxtrain.config.sections.moe import DEEPSEEK
from maxtrain.config.words import choices, multiples


def kernel_problems(config: RunConfig) -> Iterator[str]:
    """Yield what the chosen kernel does not support; with auto a kernel is chosen that supports the
    run.
    """
    if config.model.attention == AUTO:
        return
    yield from _repeat_problems(config)
    yield from _document_problems(config)
    yield from _dtype_problems(config)
    yield from _shape_problems(config)
    yield from _softcap_problems(config)
    yield from _family_problems(config)


def _repeat_problems(config: RunConfig) -> Iterator[str]:
    name = config.model.attention
    if config.determinism == "full" and not ATTENTION[name].repeats:
        others = [
            other
            for other, can in ATTENTION.items()
            if can.repeats and can.platform is None and not can.context
        ]
        yield (
            f"model.attention={name} may add in another order each time in its backward pass, "
            "which determinism=full does not allow. "
            f"Set model.attention to {choices(others)}, or determinism=seeded."
        )


def _document_problems(config: RunConfig) -> Iterator[str]:
    name = config.model.attention
    data = config.data
    if ATTENTION[name].segments or data.attend_across_documents:
        return
    rule = f"model.attention={name} does not keep the documents of a row apart"
    if rollout_settings(config) is not None:
        yield f"{rule}, and rows have several completions each. Set model.attention=xla."
    elif data.packing != "pad":
        yield (
            f"{rule}, and data.packing={data.packing} puts several into one. Set data.packing=pad, "
            "data.attend_across_documents=true to allow that, or model.attention=xla."
        )
    elif _rows_have_pairs(config):
        yield (
            f"{rule}, and with objective={config.objective} a row has both answers of a pair. "
            "Set model.attention=xla."
        )


def _rows_have_pairs(config: RunConfig) -> bool:
    """Return whether documents come in pairs, which always share a row."""
    if config.objective == "dpo":
        return config.dpo.loss_type not in UNPAIRED
    return config.objective == "reward"


def _softcap_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.attention_softcap is not None and not ATTENTION[model.attention].softcap:
        yield (
            f"model.attention={model.attention} can't bound scores, as "
            f"model.attention_softcap={model.attention_softcap} asks for. "
            "Set model.attention=xla."
        )


def _family_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    kernel = ATTENTION[model.attention]
    lacking = ""
    if model.family == "gpt_oss" and not kernel.sinks:
        lacking = "has no attention sinks"
    if model.family in DEEPSEEK and not kernel.values:
        lacking = "needs values of the size of keys"
    if lacking:
        yield (
            f"model.attention={model.attention} {lacking}, so it is not for "
            f"model.family={model.family}. Set model.attention=xla."
        )


def _dtype_problems(config: RunConfig) -> Iterator[str]:
    name = config.model.attention
    compute = config.precision.compute
    dtypes = ATTENTION[name].dtypes
    if compute not in dtypes:
        yield (
            f"model.attention={name} does not support precision.compute={compute}. "
            f"Set precision.compute to {choices(dtypes)}, or model.attention=xla."
        )


def _shape_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    name = f"model.attention={model.attention}"
    kernel = ATTENTION[model.attention]
    for key, length in row_lengths(config).items():
        if length % kernel.rows:
            valid = multiples(length, kernel.rows)
            yield (
                f"{name} needs rows of a multiple of {kernel.rows} tokens, and {key} is {length}. "
                f"Set {key} to {valid}, or model.attention=xla."
            )
    if kernel.head_dim is None:
        return
    most, unit = kernel.head_dim
    head_dim = model.head_dim or model.embed_dim // model.num_heads
    if head_dim > most or head_dim % unit:
        yield (
            f"{name} needs heads of at most {most}, a multiple of {unit}, "
            f"and model.head_dim is {head_dim}. "
            "Set model.head_dim=64, for example, or model.attention=xla."
        )


def dropout_problems(config: RunConfig) -> Iterator[str]:
    """Weights that are to be dropped by a kernel that can't."""
    rate = config.regularization.attention_dropout
    if rate and config.model.attention not in ("eager", AUTO):
        yield (
            f"regularization.attention_dropout={rate} needs an attention kernel that can drop "
            f"weights, and model.attention={config.model.attention} can't. "
            "Set model.attention=eager, or the rate to 0."
        )
