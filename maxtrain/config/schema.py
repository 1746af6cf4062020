"""The schema of a run: the root's own keys, and one section for each part. No jax here.

A part of the program receives its own section, never the root. Each section is in `sections/`,
beside what must hold inside it; `data` and `eval` are in data_pipeline/config.py. What must hold
across sections is in `across/`.
"""

import dataclasses
from typing import Literal

from data_pipeline.base.config_key import AllBut, UsedBy, key
from data_pipeline.config import MAX_SEED, DataConfig, EvalConfig, Interval
from maxtrain.config.sections.anomaly import ANOMALIES, AnomalyConfig
from maxtrain.config.sections.checkpoint import CheckpointConfig
from maxtrain.config.sections.distill import DistillConfig
from maxtrain.config.sections.dpo import DpoConfig
from maxtrain.config.sections.grpo import GrpoConfig
from maxtrain.config.sections.health import IntegrityConfig, WatchdogConfig
from maxtrain.config.sections.init import InitConfig
from maxtrain.config.sections.lora import LoraConfig
from maxtrain.config.sections.loss import LossConfig, RegularizationConfig
from maxtrain.config.sections.mesh import MeshConfig
from maxtrain.config.sections.model import LatentConfig, ModelConfig, RopeConfig
from maxtrain.config.sections.moe import MoeConfig, RoutingConfig
from maxtrain.config.sections.observe import ObserveConfig, TrackingConfig
from maxtrain.config.sections.optimizer import GroupConfig, OptimizerConfig
from maxtrain.config.sections.pipeline import PipelineConfig
from maxtrain.config.sections.ppo import PpoConfig
from maxtrain.config.sections.precision import LossScaleConfig, PrecisionConfig
from maxtrain.config.sections.remat_names import KeptConfig
from maxtrain.config.sections.reward import RewardConfig
from maxtrain.config.sections.schedule import PieceConfig, ScheduleConfig
from maxtrain.config.sections.train import TrainConfig

__all__ = [
    "ANOMALIES",
    "AnomalyConfig",
    "CheckpointConfig",
    "DataConfig",
    "DistillConfig",
    "DpoConfig",
    "EvalConfig",
    "GroupConfig",
    "GrpoConfig",
    "InitConfig",
    "IntegrityConfig",
    "KeptConfig",
    "LatentConfig",
    "LoraConfig",
    "LossConfig",
    "LossScaleConfig",
    "MeshConfig",
    "ModelConfig",
    "MoeConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PieceConfig",
    "PipelineConfig",
    "PpoConfig",
    "PrecisionConfig",
    "RegularizationConfig",
    "RewardConfig",
    "RopeConfig",
    "RoutingConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrackingConfig",
    "TrainConfig",
    "WatchdogConfig",
]


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The loop's own keys, and one section for each part."""

    run_name: str = key("run", "name of the run; its files are in output_dir/run_name")
    output_dir: str = key(
        "runs",
        "where run directories are made; s3://BUCKET/FOLDER and gs://BUCKET/FOLDER, too",
        path="any",
    )
    local_dir: str = key(
        "~/.cache/maxtrain/runs",
        "folder of this host to work in where output_dir is a URL",
        path="local",
    )
    seed: int = key(
        0, "seed of everything random, unless data.seed or init.seed is set", low=0, high=MAX_SEED
    )
    steps: int | Literal["auto"] = key("auto", "optimizer steps; auto: until the plan's end", low=1)
    eval_interval: Interval = key(
        0,
        "steps between evaluations, or epochs as in 0.5 epochs; 0: none while training",
        low=0,
        used_by=UsedBy(
            {"eval.sets": AllBut({})},
            "{key}={value} needs an evaluation set, but eval.sets is empty. "
            "Add eval.sets.NAME.path=DIR, or set {key}=0.",
        ),
    )
    eval_at_start: bool = key(
        False,
        "evaluate before the first step, too",
        used_by=UsedBy(
            {"eval.sets": AllBut({})},
            "{key}={value} needs an evaluation set, but eval.sets is empty. "
            "Add eval.sets.NAME.path=DIR, or leave it out.",
        ),
    )
    eval_steps: int = key(-1, "batches of each evaluation; -1: the whole set, exactly once", low=-1)
    checkpoint_interval: Interval = key(
        1000, "steps between checkpoints, or epochs as in 0.5 epochs; 0: only the last one", low=0
    )
    log_interval: int = key(10, "steps between records of metrics", low=1)
    determinism: Literal["off", "seeded", "full"] = key(
        "seeded",
        "seeded: records have hashes of parameters and batch; "
        "full: only programs that repeat bit for bit, for sampling too",
    )
    objective: Literal["next_token", "distill", "dpo", "reward", "grpo", "ppo"] = key(
        "next_token",
        "the loss: cross-entropy of the next token; distill: and of a teacher; dpo, reward: of "
        "preferences; grpo, ppo: of rewards",
    )
    model: ModelConfig = key(ModelConfig(), "the architecture")
    data: DataConfig = key(DataConfig(), "what the model reads")
    eval: EvalConfig = key(EvalConfig(), "evaluation sets")
    loss: LossConfig = key(LossConfig(), "more terms of the loss")
    train: TrainConfig = key(TrainConfig(), "which parameters train")
    distill: DistillConfig = key(DistillConfig(), "the teacher of objective=distill")
    dpo: DpoConfig = key(DpoConfig(), "preferences, with objective=dpo")
    reward: RewardConfig = key(RewardConfig(), "scores of answers, with objective=reward")
    grpo: GrpoConfig = key(GrpoConfig(), "rewards of completions, with objective=grpo and ppo")
    ppo: PpoConfig = key(PpoConfig(), "values of tokens, with objective=ppo")
    init: InitConfig = key(InitConfig(), "initial weights, muP")
    regularization: RegularizationConfig = key(
        RegularizationConfig(), "dropout and other noise in training"
    )
    optimizer: OptimizerConfig = key(OptimizerConfig(), "how gradients become updates")
    schedule: ScheduleConfig = key(ScheduleConfig(), "the learning rate over the run")
    precision: PrecisionConfig = key(PrecisionConfig(), "number formats")
    loss_scale: LossScaleConfig = key(LossScaleConfig(), "scaling of the loss for float16")
    anomaly: AnomalyConfig = key(AnomalyConfig(), "anomalies, and what is done about them")
    mesh: MeshConfig = key(MeshConfig(), "arrangement of devices")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "which checkpoints are saved and kept")
    watchdog: WatchdogConfig = key(WatchdogConfig(), "how long a run may make no progress")
    integrity: IntegrityConfig = key(IntegrityConfig(), "checks for errors that no device reports")
    observe: ObserveConfig = key(ObserveConfig(), "progress, curves and trackers")
