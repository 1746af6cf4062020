"""The schema of a run: the root's own keys, and one section for each part. No jax here.

A part of the program receives its own section, never the root. Each section is in `sections/`,
beside what must hold inside it; `data` and `eval` are in data_pipeline/config.py. What must hold
across sections is in `across/`.
"""

import dataclasses
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
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
from maxtrain.config.sections.remat_names import RematNamesConfig
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
    "RematNamesConfig",
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
        "folder of the run directories, or a URL: s3://BUCKET/FOLDER or gs://BUCKET/FOLDER",
        path="any",
    )
    local_dir: str = key(
        "~/.cache/maxtrain/runs",
        "working folder on this host, used if output_dir is a URL",
        path="local",
    )
    seed: int = key(
        0, "seed of everything random, unless data.seed or init.seed is set", low=0, high=MAX_SEED
    )
    steps: int | Literal["auto"] = key(
        "auto", "number of optimizer steps; auto: until the data plan ends", low=1
    )
    eval_interval: Interval = key(
        0,
        "steps between evaluations, or epochs such as '0.5 epochs'; 0: none during training",
        low=0,
        used_by=UsedBy(
            {"eval.sets": AnyValueExcept({})},
            "{key}={value} needs an evaluation set, but eval.sets is empty. "
            "Add eval.sets.NAME.path=DIR, or set {key}=0.",
        ),
    )
    eval_at_start: bool = key(
        False,
        "evaluate before the first step, too",
        used_by=UsedBy(
            {"eval.sets": AnyValueExcept({})},
            "{key}={value} needs an evaluation set, but eval.sets is empty. "
            "Add eval.sets.NAME.path=DIR, or leave it out.",
        ),
    )
    eval_steps: int = key(-1, "batches in each evaluation; -1: the whole set, exactly once", low=-1)
    checkpoint_interval: Interval = key(
        1000,
        "steps between checkpoints, or epochs such as '0.5 epochs'; 0: only the last one",
        low=0,
    )
    log_interval: int = key(10, "steps between metric records", low=1)
    determinism: Literal["off", "seeded", "full"] = key(
        "seeded",
        "off: no guarantee; seeded: records have hashes of parameters and batch; full: only "
        "programs that repeat bit for bit, for sampling too",
    )
    objective: Literal["next_token", "distill", "dpo", "reward", "grpo", "ppo"] = key(
        "next_token",
        "training objective: next_token: cross-entropy; distill: also match a teacher; dpo, "
        "reward: learn from preferences; grpo, ppo: learn from rewards",
    )
    model: ModelConfig = key(ModelConfig(), "the architecture")
    data: DataConfig = key(DataConfig(), "training data, packing and batches")
    eval: EvalConfig = key(EvalConfig(), "evaluation sets")
    loss: LossConfig = key(LossConfig(), "extra terms of the loss")
    train: TrainConfig = key(TrainConfig(), "parameters that train, or are frozen")
    distill: DistillConfig = key(DistillConfig(), "the teacher of objective=distill")
    dpo: DpoConfig = key(DpoConfig(), "preference losses of objective=dpo")
    reward: RewardConfig = key(RewardConfig(), "reward model of objective=reward")
    grpo: GrpoConfig = key(
        GrpoConfig(), "rewards, sampling and loss of objective=grpo; rewards and sampling of ppo"
    )
    ppo: PpoConfig = key(PpoConfig(), "KL penalty, advantages and value loss of objective=ppo")
    init: InitConfig = key(InitConfig(), "initial weights, muP")
    regularization: RegularizationConfig = key(
        RegularizationConfig(), "dropout and other noise in training"
    )
    optimizer: OptimizerConfig = key(OptimizerConfig(), "how gradients become updates")
    schedule: ScheduleConfig = key(ScheduleConfig(), "the learning rate over the run")
    precision: PrecisionConfig = key(PrecisionConfig(), "dtypes of weights, activations and sums")
    loss_scale: LossScaleConfig = key(LossScaleConfig(), "scaling of the loss for float16")
    anomaly: AnomalyConfig = key(
        AnomalyConfig(), "anomaly detection, and the policy for each anomaly"
    )
    mesh: MeshConfig = key(MeshConfig(), "arrangement of devices")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), "saving, retention and initial weights")
    watchdog: WatchdogConfig = key(WatchdogConfig(), "time limits, after which a hanging run ends")
    integrity: IntegrityConfig = key(IntegrityConfig(), "checks for silent data corruption")
    observe: ObserveConfig = key(
        ObserveConfig(), "progress display, curves, trackers and profiling"
    )
