"""The schema of a run: every key with its type, default and one line of help. No jax here.

A part of the program receives its own section, never the root. Cross-field rules live in
`checks.py`.
"""

import dataclasses
from typing import Literal

from data_pipeline.config import MAX_SEED, DataConfig, EvalConfig, Interval, key


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture. Letters in shapes: D embed, F mlp, N heads, K kv heads, H head dim, L
    layers, V vocabulary."""

    family: Literal["llama", "qwen3"] = key("llama", "block choices and Hugging Face names")
    vocab_size: int | None = key(
        None, "V; null: the vocabulary of the training data's tokenizer", low=1
    )
    num_layers: int = key(4, "L", low=1, high=10_000)
    embed_dim: int = key(256, "D, model width", low=1, high=1 << 20)
    mlp_dim: int = key(704, "F, feed-forward width", low=1, high=1 << 22)
    num_heads: int = key(4, "N, query heads", low=1, high=1 << 14)
    num_kv_heads: int = key(4, "K, key/value heads; must divide num_heads", low=1, high=1 << 14)
    head_dim: int | None = key(None, "H; null: embed_dim / num_heads", low=2, high=1 << 14)
    tie_embeddings: bool = key(False, "use the embedding table as the output head")
    max_length: int = key(8192, "longest sequence the model is meant for, tokens", low=1)
    norm_eps: float = key(1e-5, "added to the mean square in RMSNorm", low=1e-12, high=1)
    rope_theta: float = key(500_000.0, "base of the rotary frequencies", low=1, high=1e15)
    rope_scaling: Literal["none", "llama3"] = key(
        "none", "stretch of the rotary frequencies for long contexts"
    )
    rope_factor: float = key(
        8.0, "llama3 rope scaling: stretch of the long wavelengths", low=1, high=1e6
    )
    rope_low_freq_factor: float = key(
        1.0, "llama3 rope scaling: below this many turns, stretch fully", above=0, high=1e6
    )
    rope_high_freq_factor: float = key(
        4.0, "llama3 rope scaling: above this many turns, do not stretch", above=0, high=1e6
    )
    rope_original_length: int = key(
        8192, "llama3 rope scaling: context of the unstretched model, tokens", low=1
    )
    attention: Literal["eager", "xla", "cudnn", "flash"] = key(
        "xla", "kernel: the plain oracle, XLA's blocks, cuDNN's on GPUs, or flash attention on TPUs"
    )
    scan_layers: bool = key(
        True, "run layers as one scanned loop (fast compile) or unrolled (fast step)"
    )
    remat: Literal["none", "full", "dots", "dots_no_batch"] = key(
        "none", "what the backward pass recomputes; see models/decoder.py"
    )
    loss_chunk: int = key(
        2048, "tokens whose logits exist at one time in the loss, per device; 0: all at once", low=0
    )


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Initial weights, and with muP how they and learning rates go with width and depth; see
    models/init.py."""

    name: Literal[
        "lecun_normal",
        "xavier_normal",
        "xavier_uniform",
        "kaiming_normal",
        "kaiming_uniform",
        "truncated_normal",
        "normal",
    ] = key(
        "lecun_normal",
        "distribution of matrices; all but the uniform ones and `normal` are cut at 2 deviations",
    )
    std: float | None = key(
        None,
        "standard deviation for truncated_normal and normal; null for the others",
        above=0,
        high=1000,
    )
    residual: Literal["none", "depth"] = key(
        "depth", "outputs of attention and mlp: as the rest, or 1 / sqrt(2 L) of it"
    )
    embedding_std: float | None = key(
        None, "standard deviation of the embedding table; null: 1 / sqrt(D)", above=0, high=1000
    )
    scale: float = key(
        1.0, "multiplies the standard deviation of every initial matrix", above=0, high=1000
    )
    seed: int | None = key(
        None, "of the initial weights; null: the root's seed", low=0, high=MAX_SEED
    )
    mup_base_width: int | None = key(
        None, "muP: embed_dim that the learning rate was chosen at; null: no muP", low=1
    )
    mup_base_head_dim: int | None = key(
        None, "muP: scores by 1 / head_dim, as usual at this head_dim; null: by its root", low=2
    )
    mup_base_depth: int | None = key(
        None, "muP: num_layers that the learning rate was chosen at; null: depth as usual", low=1
    )


@dataclasses.dataclass(frozen=True)
class RegularizationConfig:
    """What is random in a training step, drawn from a key of each row; off in evaluation and
    generation."""

    attention_dropout: float = key(
        0.0, "probability of dropping each attention weight; needs model.attention=eager", low=0
    )
    residual_dropout: float = key(
        0.0, "probability of dropping each number that a block adds to the residual stream", low=0
    )
    embedding_dropout: float = key(
        0.0, "probability of dropping each number of the embedded tokens", low=0
    )
    stochastic_depth: float = key(
        0.0, "probability of leaving out the last layer's blocks for a row; less before it", low=0
    )
    embedding_noise: float = key(
        0.0,
        "NEFTune's alpha: uniform noise of alpha / sqrt(T D) on embedded tokens",
        low=0,
        high=1e6,
    )


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """Parameters that are updated in another way, chosen by their paths, such as
    `layers.0.attention.q.kernel`."""

    pattern: str = key(
        "",
        "regular expression, searched in the path of a parameter; no parameter may be in two groups",
    )
    lr_factor: float = key(
        1.0, "multiplies the learning rate; 0: left as they are", low=0, high=1e6
    )
    weight_decay: float | None = key(
        None, "of these, vectors too; null: as the rest", low=0, high=1e6
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates. The learning rate over the run is the section `schedule`."""

    name: Literal["adamw", "adam", "sgd", "momentum", "nesterov", "adafactor", "lion", "muon"] = (
        key(
            "adamw",
            "update rule; muon: of the layers' matrices, AdamW of the rest; see docs/numerics.md",
        )
    )
    learning_rate: float = key(3e-4, "peak", above=0)
    momentum: float = key(
        0.95, "momentum, nesterov, muon: decay of the sum or mean of gradients", low=0
    )
    beta1: float = key(0.9, "decay of the mean of gradients", low=0)
    beta2: float = key(0.95, "decay of the mean of squared gradients", low=0)
    eps: float = key(1e-8, "added to the root of the second moment", above=0, high=1e6)
    weight_decay: float = key(
        0.1,
        "of matrices, decoupled, or in the gradient for adam, sgd, momentum and nesterov",
        low=0,
        high=1e6,
    )
    no_decay: tuple[str, ...] = key(
        (), "regular expressions: no decay for parameters in whose path one is found"
    )
    groups: dict[str, GroupConfig] = key(
        {}, "parameters with rates of their own, by a name of yours"
    )
    clip_norm: float | None = key(
        1.0, "largest global norm of the gradient; null: no such clipping", above=0
    )
    clip_value: float | None = key(
        None, "largest size of each number of the gradient, before clip_norm; null: any", above=0
    )
    clip_adaptive: float | None = key(
        None,
        "largest norm of each output's gradient, relative to its weights' norm, before clip_norm; null: any",
        above=0,
    )
    accumulation: int = key(1, "micro-batches in one step; must divide data.batch_size", low=1)
    normalize: Literal["tokens", "sequences", "constant"] = key(
        "tokens",
        "what the loss is a mean of: all targets, documents whatever their length, or positions, targets or not",
    )
    ema_decay: float | None = key(
        None, "of an average of the weights, for evaluation and generation; null: none", above=0
    )
    stochastic_rounding: bool = key(
        False, "bfloat16 weights: round updates up or down at random, right on average"
    )
    zero: int = key(
        0,
        "over mesh.data, split: 1 optimizer state, 2 gradients too, 3 parameters too",
        low=0,
        high=3,
    )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimised beside, and instead of, the plain cross-entropy of the next token."""

    label_smoothing: float = key(
        0.0,
        "share of a target's probability that all entries of the vocabulary share",
        low=0,
        high=1,
    )
    z_loss: float = key(
        0.0,
        "factor of the mean of logsumexp(logits)^2, which keeps logits from drifting; usual: 1e-4",
        low=0,
        high=1000,
    )
    adversarial: float = key(
        0.0,
        "factor of the loss at the worst embeddings nearby; see training/adversarial.py",
        low=0,
        high=1000,
    )
    adversarial_radius: float = key(
        1.0, "farthest that a row's embeddings are moved, Euclidean", above=0, high=1e6
    )
    adversarial_steps: int = key(
        1,
        "1: along the gradient at once (FGM); more: step by step, projected (PGD)",
        low=1,
        high=1000,
    )
    by_source: bool = key(False, "record the loss of each training source's rows too")


@dataclasses.dataclass(frozen=True)
class PieceConfig:
    """One piece of a schedule; rates are factors of the peak, optimizer.learning_rate."""

    name: Literal["constant", "linear", "cosine", "exponential", "inverse_sqrt", "polynomial"] = (
        key("linear", "its shape")
    )
    until: float | None = key(
        None, "where it ends, counted from the start of the run; null: the run's end", above=0
    )
    unit: Literal["steps", "fraction"] = key("steps", "unit of `until`; fraction is of all steps")
    start: float | None = key(
        None, "factor of its first update; null: of the last one before it", low=0, high=1e6
    )
    end: float = key(0.0, "factor of its last update; inverse_sqrt: the least", low=0, high=1e6)
    power: float = key(2.0, "polynomial: exponent of what is left", above=0, high=1000)


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the updates of the run. The horizon is the number of steps of the
    plan."""

    name: Literal[
        "constant", "linear", "cosine", "exponential", "inverse_sqrt", "polynomial", "wsd", "pieces"
    ] = key("cosine", "shape after warm-up, see training/schedule.py; wsd: warm-up, stable, decay")
    warmup_steps: int = key(
        100, "steps of linear warm-up; a tenth of the run, if not set for it and too long", low=0
    )
    min_lr_ratio: float = key(
        0.1, "rate at the end of the decay, as a factor of the peak", low=0, high=1
    )
    min_learning_rate: float | None = key(
        None, "that rate itself, in place of min_lr_ratio; null: by min_lr_ratio", low=0
    )
    decay_fraction: float = key(0.2, "wsd: share of the run spent decaying", above=0, high=1)
    power: float = key(2.0, "polynomial: exponent of what is left", above=0, high=1000)
    timescale: int | None = key(
        None, "inverse_sqrt: updates that halve the square; null: those before it began", low=1
    )
    pieces: tuple[PieceConfig, ...] = key((), "pieces: what follows the warm-up, in order")


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Which numbers are used where. Norms, softmax, rope and the loss are float32 always."""

    params: Literal["float32", "bfloat16"] = key("float32", "master weights and optimizer state")
    compute: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16", "inputs of matrix products; they accumulate in float32"
    )
    accumulate: Literal["float32", "bfloat16"] = key("float32", "sums of micro-batches' gradients")
    output: Literal["float32", "bfloat16"] = key(
        "float32", "what logits are rounded to, and kept in, before the softmax"
    )


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """Scaling of the loss, so that small gradients survive float16; see training/loss_scale.py."""

    mode: Literal["auto", "none", "static", "dynamic"] = key(
        "auto", "auto: dynamic for precision.compute=float16, else none"
    )
    initial: float = key(2.0**16, "scale of the first step, and of every step if static", above=0)
    window: int = key(1000, "dynamic: finite steps in a row after which the scale grows", low=1)
    factor: float = key(2.0, "dynamic: what it grows by", above=1)
    backoff: float = key(0.5, "dynamic: what it is multiplied with after overflows", above=0)
    hysteresis: int = key(2, "dynamic: overflows, since it last grew, before it is lowered", low=1)
    min: float = key(1.0, "dynamic: never lower", above=0)
    max: float = key(2.0**32, "dynamic: never higher", above=0)


ANOMALIES = (
    "non_finite",
    "loss_spike",
    "grad_spike",
    "weight_drift",
    "dead",
    "diverging",
)  # as training/watch.py orders them
SpikePolicy = Literal["off", "warn", "skip", "rollback", "stop"]
RunPolicy = Literal[
    "off", "warn", "rollback", "stop"
]  # what earlier updates did is not undone by skipping one


@dataclasses.dataclass(frozen=True)
class AnomalyConfig:
    """What to do about a step or a run that is not well: a key for each kind, then limits. Judged
    by training/watch.py.

    off: not looked at. warn: told. skip: the step changes nothing. rollback: from an earlier
        checkpoint on, without the data
    there. stop: saved as before that step, exit 70.
    """

    non_finite: Literal["skip", "rollback", "stop"] = key(
        "skip", "loss or gradient is not finite; no such update is ever made"
    )
    loss_spike: SpikePolicy = key(
        "warn", "loss above the median of the window by loss_limit deviations"
    )
    grad_spike: SpikePolicy = key(
        "warn", "gradient norm above the median of the window by grad_limit deviations"
    )
    weight_drift: RunPolicy = key(
        "off",
        "norm of all weights away from its median by a share of drift_limit; reads all weights",
    )
    dead: RunPolicy = key("warn", "for dead_steps no gradient, or always the very same loss")
    diverging: RunPolicy = key(
        "warn", "median of the loss above the lowest one there was, times diverging_limit"
    )
    window: int = key(128, "accepted steps that medians and deviations are of", low=4, high=256)
    min_steps: int = key(
        32, "accepted steps before anything is compared with them", low=4, high=256
    )
    loss_limit: float = key(
        10.0,
        "deviations, of 1.4826 times the median absolute one, that a loss may be above",
        above=0,
    )
    grad_limit: float = key(20.0, "deviations that a gradient norm may be above", above=0)
    drift_limit: float = key(
        0.1, "share of their median by which the norm of all weights may change", above=0
    )
    diverging_limit: float = key(
        1.5, "what the median of the loss may be, as a multiple of the lowest one", above=1
    )
    dead_steps: int = key(16, "steps in a row that are as dead before that is one", low=1)
    patience: int = key(
        8,
        "spikes in a row before their level is taken for the new one, and the window begins afresh",
        low=1,
    )
    max_skipped: int = key(
        8, "non-finite steps in a row that are skipped before the run stops with exit 70", low=0
    )
    leave_out: int = key(
        8, "rollback: steps that are left out, up to and with the one that was found", low=1
    )
    max_rollbacks: int = key(4, "rollbacks of a run before the next anomaly stops it", low=0)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged. At most one axis may be -1: whatever is left."""

    data: int = key(1, "replicas of the model, each with its own rows", high=1 << 20)
    fsdp: int = key(
        -1,
        "parameters split and gathered layer by layer, each part with its own rows",
        high=1 << 20,
    )
    tensor: int = key(1, "heads, mlp and vocabulary split inside each layer", high=1 << 20)
    platform: Literal["auto", "cpu", "gpu", "tpu"] = key(
        "auto", "required device kind; auto: the best there is"
    )
    simulated_devices: int | None = key(
        None, "CPU only: pretend to have this many devices", low=1, high=4096
    )
    coordinator: str | None = key(
        None, "host:port of process 0; null: JAX_COORDINATOR_ADDRESS, or the cluster's own"
    )
    num_processes: int | None = key(
        None,
        "processes in the job; null: JAX_NUM_PROCESSES, or the cluster's own",
        low=1,
        high=1 << 20,
    )
    process_id: int | None = key(
        None, "index of this process; null: JAX_PROCESS_ID, or the cluster's own", low=0
    )
    min_processes: int | None = key(
        None, "go on with as few when others do not come at the start; null: all of them", low=1
    )
    connect_seconds: float = key(
        300.0, "how long processes wait for each other at the start", above=0, high=1e6
    )
    heartbeat_seconds: int = key(
        100, "a process that is silent for so long ends the job", low=1, high=1_000_000
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved beside the root's checkpoint_interval. A final checkpoint is always written."""

    minutes: float | None = key(
        None,
        "also save when so many minutes passed since the last save; null: never",
        above=0,
        high=1e6,
    )
    keep: int = key(3, "newest checkpoints kept", low=1)
    keep_every: int | None = key(
        None, "also keep every checkpoint whose step is a multiple of this; null: none", low=1
    )
    keep_best: bool = key(
        False, "also keep the saved steps at which an evaluation set's loss is the best so far"
    )
    asynchronous: bool = key(True, "write in the background while training goes on")
    copy_to: str | None = key(
        None,
        "directory on another disk that good steps are copied to meanwhile; null: none",
        path="local",
    )
    copy_keep: int = key(3, "newest checkpoints kept there", low=1)
    grace_seconds: float = key(
        300.0,
        "from SIGTERM or SIGINT to the end of the process, saved or not; 0: no limit",
        low=0,
        high=1e8,
    )
    init_from: str | None = key(
        None,
        "start from the weights of this run, checkpoint or Hugging Face directory; null: random",
        path="local",
    )
    start_over: bool = key(
        False,
        "begin at step 1 although saved steps are gone; what the run left otherwise is kept in its folder, before-DATE",
    )
    init_partial: tuple[str, ...] = key(
        (), "regular expressions: parameters of init_from that may differ, and are new then"
    )


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """How long a run may stand still before it says where and ends with exit 75; see
    observe/watchdog.py."""

    factor: float = key(
        10.0,
        "limit of a step, as so many times the usual time between two records; 0: none",
        low=0,
        high=1e6,
    )
    step_seconds: float = key(300.0, "limit of a step, at least", low=0, high=1e8)
    compile_seconds: float = key(
        3600.0,
        "limit of compiling, and of a step before the third record; 0: none",
        low=0,
        high=1e8,
    )
    eval_seconds: float = key(3600.0, "limit of one evaluation set; 0: none", low=0, high=1e8)
    save_seconds: float = key(
        1800.0, "limit of waiting for a save, and of a restore; 0: none", low=0, high=1e8
    )


@dataclasses.dataclass(frozen=True)
class IntegrityConfig:
    """Looking for wrong arithmetic and memory that no device reports; found, it ends the run with
    exit 75, unsaved."""

    replicas_interval: int = key(
        0,
        "steps between comparisons of the copies of arrays on different devices; also before each save; 0: never",
        low=0,
    )
    repeat_interval: int = key(
        0,
        "steps between two that are made twice, from a second copy of the state, and compared; 0: never",
        low=0,
    )


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What a person sees."""

    progress: Literal["auto", "rich", "plain", "off"] = key(
        "auto", "live line, plain lines, or none; auto: live in a terminal"
    )
    tensorboard: bool = key(True, "write TensorBoard event files")
    plot: bool = key(True, "draw the curves to curves.png")
    prompts: tuple[str, ...] = key((), "texts that the model completes at the end of the run")
    sample_interval: int = key(
        0, "steps between completions of prompts while training; 0: only at the end", low=0
    )
    peak_tflops: float | None = key(
        None,
        "TFLOP/s of one device for MFU; null: from the table, or measured on a CPU",
        above=0,
        high=1e9,
    )
    compilation_cache: str | None = key(
        "~/.cache/maxtrain/jax",
        "directory that keeps compiled programs between runs; null: none",
        path="local",
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The loop's own keys, and one section for each part."""

    run_name: str = key("run", "name of the run; its files are in output_dir/run_name")
    output_dir: str = key("runs", "where run directories are made", path="local")
    seed: int = key(
        0, "of everything random; data.seed and init.seed may differ from it", low=0, high=MAX_SEED
    )
    steps: int | Literal["auto"] = key("auto", "optimizer steps; auto: until the plan's end", low=1)
    eval_interval: Interval = key(
        0, "steps between evaluations, or 0.5 epochs; 0: none while training", low=0
    )
    eval_at_start: bool = key(False, "evaluate before the first step, too")
    eval_steps: int = key(-1, "batches of each evaluation; -1: a set whole, exactly once", low=-1)
    checkpoint_interval: Interval = key(
        1000, "steps between checkpoints, or 0.5 epochs; 0: only the final one", low=0
    )
    log_interval: int = key(10, "steps between records of metrics", low=1)
    determinism: Literal["off", "seeded", "full"] = key(
        "seeded",
        "seeded: records have hashes of parameters and batch; full: also only programs that repeat bit for bit",
    )
    model: ModelConfig = key(ModelConfig(), "the architecture")
    data: DataConfig = key(DataConfig(), "what the model reads")
    eval: EvalConfig = key(EvalConfig(), "what is held out")
    loss: LossConfig = key(LossConfig(), "what is minimised")
    init: InitConfig = key(InitConfig(), "initial weights, muP")
    regularization: RegularizationConfig = key(
        RegularizationConfig(), "dropout and other noise in training"
    )
    optimizer: OptimizerConfig = key(OptimizerConfig(), "how gradients become updates")
    schedule: ScheduleConfig = key(ScheduleConfig(), "the learning rate over the run")
    precision: PrecisionConfig = key(PrecisionConfig(), "number formats")
    loss_scale: LossScaleConfig = key(LossScaleConfig(), "scaling of the loss for float16")
    anomaly: AnomalyConfig = key(AnomalyConfig(), "what is not well, and what is done about it")
    mesh: MeshConfig = key(MeshConfig(), "arrangement of devices")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "saving")
    watchdog: WatchdogConfig = key(WatchdogConfig(), "how long a run may stand still")
    integrity: IntegrityConfig = key(IntegrityConfig(), "wrong arithmetic that no device reports")
    observe: ObserveConfig = key(ObserveConfig(), "what a person sees")
