"""The meshes of eight devices that `benchmarks.meshes` trains on, and the models."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxtrain.config.schema import ModelConfig, MoeConfig, PipelineConfig, RoutingConfig
from maxtrain.config.sections.rules import RulesConfig

# Tokens of a row.
T = 32

DENSE = ModelConfig(
    vocab_size=128,
    num_layers=4,
    embed_dim=64,
    mlp_dim=96,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
    max_length=T,
)
EXPERTS = dataclasses.replace(
    DENSE,
    family="mixtral",
    mlp_dim=32,
    moe=MoeConfig(num_experts=8, experts_per_token=2),
    routing=RoutingConfig(balance=0.01, balance_scope="global"),
)
# A layer for each device.
DEEP = dataclasses.replace(DENSE, num_layers=8)
RING = {"attention": "ring"}
TURNS = PipelineConfig(schedule="1f1b")
USUAL = RulesConfig()
# Where parameters are in no mesh by itself: none of their dims is split as it is computed with.
ELSEWHERE = RulesConfig(
    embed=("tensor",),
    vocab=("fsdp",),
    mlp=("fsdp", "data"),
    heads=("data", "fsdp"),
    kv_heads=("context",),
    expert_embed=("expert",),
    exp=("tensor",),
)


class MeshCase(NamedTuple):
    """A mesh, with the model and settings to run on it.

    Attributes:
        model: whose layers are split.
        axes: sizes of axes other than 1.
        changes: keys of the model.
        accumulation: micro-batches of a step.
        rules: where parameters are stored.
        is_shared: several processes have it, too.
    """

    model: ModelConfig
    axes: Mapping[str, int]
    changes: Mapping[str, Any] = {}
    accumulation: int = 1
    rules: RulesConfig = USUAL
    is_shared: bool = False

    @property
    def name(self) -> str:
        parts = [f"{axis}{size}" for axis, size in self.axes.items()]
        if self.model is EXPERTS:
            parts.insert(0, "moe")
        if self.accumulation > 1:
            parts.append(f"accumulation{self.accumulation}")
        if self.changes.get("attention") == "ring":
            parts.append("ring")
        if "pipeline" in self.changes:
            pipeline = self.changes["pipeline"]
            if pipeline.rounds > 1:
                parts.append(f"rounds{pipeline.rounds}")
            if pipeline.schedule != "gpipe":
                parts.append(pipeline.schedule)
        if self.rules != USUAL:
            parts.append("stored-elsewhere")
        return "-".join(parts)


CASES = (
    MeshCase(DENSE, {"data": 8}, is_shared=True),
    MeshCase(DENSE, {"fsdp": 8}, is_shared=True),
    MeshCase(DENSE, {"tensor": 8}, is_shared=True),
    MeshCase(DENSE, {"context": 8}, RING, is_shared=True),
    MeshCase(DENSE, {"context": 8}, is_shared=True),
    MeshCase(DEEP, {"stage": 8}),
    MeshCase(DENSE, {"stage": 4, "data": 2}),
    MeshCase(DENSE, {"data": 2, "fsdp": 4}, {"remat": "full"}, is_shared=True),
    MeshCase(DENSE, {"fsdp": 4, "tensor": 2}),
    MeshCase(DENSE, {"fsdp": 2, "tensor": 4}, {"scan_layers": False}, is_shared=True),
    MeshCase(DENSE, {"data": 2, "fsdp": 2, "tensor": 2}, accumulation=2),
    MeshCase(DENSE, {"fsdp": 4, "context": 2}, RING),
    MeshCase(DENSE, {"fsdp": 2, "context": 2, "tensor": 2}, is_shared=True),
    MeshCase(DENSE, {"data": 2, "context": 2, "tensor": 2}, RING, 2, is_shared=True),
    MeshCase(DENSE, {"stage": 2, "fsdp": 4}, is_shared=True),
    MeshCase(DENSE, {"stage": 2, "fsdp": 2, "tensor": 2}, {"remat": "full"}, 2, is_shared=True),
    MeshCase(DENSE, {"stage": 2, "fsdp": 2, "context": 2}, RING),
    MeshCase(DENSE, {"stage": 2, "tensor": 4}, is_shared=True),
    MeshCase(
        DENSE, {"stage": 2, "data": 4}, {"pipeline": PipelineConfig(rounds=2)}, is_shared=True
    ),
    MeshCase(DENSE, {"stage": 4, "data": 2}, {"pipeline": TURNS}, is_shared=True),
    MeshCase(DENSE, {"stage": 2, "fsdp": 2, "tensor": 2}, {"pipeline": TURNS}, 2, is_shared=True),
    MeshCase(EXPERTS, {"fsdp": 8}),
    MeshCase(EXPERTS, {"expert": 8}, is_shared=True),
    MeshCase(EXPERTS, {"fsdp": 2, "expert": 4}),
    MeshCase(EXPERTS, {"data": 2, "expert": 4}, accumulation=2),
    MeshCase(EXPERTS, {"fsdp": 2, "expert": 2, "tensor": 2}, is_shared=True),
    MeshCase(EXPERTS, {"fsdp": 2, "context": 2, "expert": 2}, RING, is_shared=True),
    MeshCase(EXPERTS, {"fsdp": 4, "tensor": 2}, is_shared=True),
    MeshCase(EXPERTS, {"stage": 2, "fsdp": 4}),
    MeshCase(EXPERTS, {"stage": 2, "fsdp": 4}, {"pipeline": TURNS}),
    MeshCase(DENSE, {"data": 2, "fsdp": 2, "tensor": 2}, rules=ELSEWHERE, is_shared=True),
    MeshCase(DENSE, {"stage": 2, "context": 2, "tensor": 2}, rules=ELSEWHERE),
    MeshCase(EXPERTS, {"fsdp": 2, "expert": 2, "tensor": 2}, rules=ELSEWHERE),
)
