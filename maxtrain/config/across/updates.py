"""Rules for what an update is made of: the loss, the optimizer, the precision, and the learning
rates of muP.
"""

from collections.abc import Iterator

from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.mesh import stage_axes_of, stage_words, without_stages
from maxtrain.config.sections.optimizer import WITH_BETAS, pattern_problem

# bfloat16 keeps 8 bits: what changes a number by less than half of the last one leaves it as it is.
_BFLOAT16_STEP = 2**-8
_WITHOUT_MUP_DEPTH = ("sgd", "momentum", "nesterov")
_WITHOUT_MUP = ("adafactor", "muon")


def mean_problems(config: RunConfig) -> Iterator[str]:
    """A mean over documents where a row is one document."""
    data = config.data
    one_document = data.attend_across_documents and data.packing != "pad"
    if config.optimizer.normalize == "sequences" and one_document:
        yield (
            "optimizer.normalize=sequences is a mean over documents, but "
            "data.attend_across_documents=true treats all documents in a row as one. "
            "Set data.attend_across_documents=false, or optimizer.normalize=tokens."
        )


def pattern_problems(config: RunConfig) -> Iterator[str]:
    """Regular expressions for the paths of parameters."""
    for pattern in config.optimizer.no_decay:
        yield from pattern_problem("optimizer.no_decay", pattern)
    for pattern in config.checkpoint.init_partial:
        yield from pattern_problem("checkpoint.init_partial", pattern)
    for pattern in config.train.only:
        yield from pattern_problem("train.only", pattern)
    for pattern in config.train.freeze:
        yield from pattern_problem("train.freeze", pattern)
    for name, group in config.optimizer.groups.items():
        yield from pattern_problem(f"optimizer.groups.{name}.pattern", group.pattern)


def moment_problems(config: RunConfig) -> Iterator[str]:
    """A second moment that never changes, because its changes are too small for its type."""
    optimizer = config.optimizer
    rounded = config.precision.params == "bfloat16" and optimizer.name in WITH_BETAS
    if rounded and 1 - optimizer.beta2 < _BFLOAT16_STEP:
        yield (
            f"optimizer.beta2={optimizer.beta2} changes a moment by less than half a step of "
            "precision.params=bfloat16, so it would never change. "
            "Set optimizer.beta2=0.95, or precision.params=float32."
        )


def on_host_problems(config: RunConfig) -> Iterator[str]:
    """Moments on hosts, with what their updates layer by layer can't do."""
    optimizer = config.optimizer
    if not optimizer.on_host:
        return
    if optimizer.stochastic_rounding:
        yield (
            "optimizer.on_host=true updates layer by layer, and optimizer.stochastic_rounding=true "
            "draws for all layers at once. Set one of the two to false."
        )
    if stage_axes_of(config.mesh):
        yield (
            "optimizer.on_host=true updates one layer on all devices at a time, but with "
            f"{stage_words(config.mesh)} these hold different layers. "
            f"Set {without_stages(config.mesh)}, or optimizer.on_host=false."
        )


def weights_on_host_problems(config: RunConfig) -> Iterator[str]:
    """Weights on hosts, with what can't fetch them layer by layer."""
    weights = config.train.on_host
    if weights == "none":
        return
    if not config.model.scan_layers:
        yield (
            f"train.on_host={weights} fetches the weights of a layer in a loop over layers, which "
            "model.scan_layers=false writes out. Set model.scan_layers=true, or train.on_host=none."
        )
    if config.model.remat == "none":
        yield (
            f"train.on_host={weights} fetches the weights of a layer again for the backward pass, "
            "and model.remat=none would keep those of all layers until then. "
            "Set model.remat=full, for example, or train.on_host=none."
        )
    if stage_axes_of(config.mesh):
        yield (
            f"train.on_host={weights} fetches one layer to all devices at a time, but with "
            f"{stage_words(config.mesh)} these hold different layers. "
            f"Set {without_stages(config.mesh)}, or train.on_host=none."
        )
    if weights == "all" and not config.optimizer.on_host:
        yield (
            "train.on_host=all updates weights layer by layer, as optimizer.on_host=true does. "
            "Set optimizer.on_host=true, or train.on_host=frozen if only weights that do not train "
            "are meant."
        )


def mup_depth_problems(config: RunConfig) -> Iterator[str]:
    """Optimizers for which muP has no rule of depth."""
    name = config.optimizer.name
    init = config.init
    wanted = init.mup_base_width is not None and init.mup_base_depth is not None
    if wanted and name in _WITHOUT_MUP_DEPTH:
        yield (
            f"init.mup_base_depth={init.mup_base_depth} has no rule for optimizer.name={name}. "
            "Set optimizer.name=adamw, adam or lion, or init.mup_base_depth=null."
        )


def mup_problems(config: RunConfig) -> Iterator[str]:
    """Optimizers for which muP has no rates."""
    name = config.optimizer.name
    width = config.init.mup_base_width
    if width is not None and name in _WITHOUT_MUP:
        yield (
            f"optimizer.name={name} is not for init.mup_base_width={width}: "
            "muP is defined for Adam, Lion and SGD. Set optimizer.name=adamw, adam, lion, sgd, "
            "momentum or nesterov, or init.mup_base_width=null."
        )


def repeat_problems(config: RunConfig) -> Iterator[str]:
    """Steps that are compared with themselves by programs that need not repeat."""
    interval = config.integrity.repeat_interval
    if interval and config.determinism != "full":
        yield (
            f"integrity.repeat_interval={interval} needs programs that repeat bit for bit, "
            f"which determinism={config.determinism} does not promise. "
            "Set determinism=full, or leave it out."
        )
