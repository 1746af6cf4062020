"""Random configs: each must train for two steps, with evaluation, saves and a resume, or be refused
with advice on what to change.

    python -m benchmarks.fuzz_configs [--trials 300] [--seed 1] [--first 0] [--folder DIR]

A trial draws an objective, and values for some keys: most of them usual, some at the ends of their
ranges. Keys of the other objectives are drawn rarely, since they are refused. If the checks refuse
the config, their message must say what to change. The key that they name is then removed, until the
config is accepted, or none of the keys is left to remove.

What an objective reads (pairs of answers, prompts, a teacher) is made when the first trial needs
it. A trial with `mesh.dcn_...` runs as two processes, each of which counts as a slice.

An accepted config trains for about two steps, with a checkpoint after each. Then the last
checkpoint is removed, and the same command must end with the same numbers and arrays, bit for bit.
A run may also end with a message (the model diverges, a document is longer than a row), but never
with a traceback or by a signal, and it must not hang.

The exit code is 1 if something was found; its log and the command are then named.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from benchmarks.chaos.victim import ROOT, WORDS, Scene, end, make_data
from data_pipeline.base.errors import ConfigError
from maxtrain.checkpoint.listing import complete, saved_digests
from maxtrain.commands.compare import compare_arrays, compare_records
from maxtrain.config import RunConfig, load_config
from maxtrain.config.keys import element
from maxtrain.observe.metrics import read_metrics

DEVICES = 8
CHANGES = {
    "steps": 2,
    "log_interval": 1,
    "eval_interval": 2,
    "eval_steps": 1,
    "checkpoint_interval": 1,
    "schedule": {"warmup_steps": 1},
    "precision": {},
    "model": {
        "num_layers": 1,
        "embed_dim": 16,
        "mlp_dim": 32,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_length": 64,
    },
    "mesh": {"data": 2, "fsdp": 4, "simulated_devices": DEVICES},
}
# Refusals after which a trial is given up.
MOST_REFUSALS = 20
# How advice begins.
ADVICE = re.compile(
    r"(Set|Add|Keep|Write|Leave|Did you mean|Remove|Correct|Give|Use|Lower|Raise|Prepare|Install"
    r"|Look|Fix|Make|Restore|Put|Check|Name|Choose)\b"
)
# Keys that no trial draws: those of folders and processes, those that end a run early or only wait,
# and those of trackers that need a network.
NOT_DRAWN = re.compile(
    r"run_name|output_dir|local_dir|steps|checkpoint_interval|log_interval|.*\.path"
    r"|data\.(cache|cache_bytes|accept_changes|workers)"
    r"|mesh\.(platform|simulated_devices|coordinator|num_processes|process_id|min_processes"
    r"|planned_processes|connect_seconds|heartbeat_seconds|dcn_data|dcn_stage|dcn_fsdp)"
    r"|checkpoint\.(copy_to|local|init_adapters|minutes|grace_seconds)"
    r"|observe\.(trackers|compilation_cache|tracking\..*)|objective|watchdog\..*"
    r"|.*\.NAME\.?.*"
)
# Values of keys whose range says too little about what is usual. Other keys get the ends of their
# range, and some values between them.
HINTS: dict[str, Sequence[str]] = {
    "seed": ["0", "1", "4294967295"],
    "eval_interval": ["0", "1", "2", "3"],
    "eval_steps": ["-1", "1", "2", "1000"],
    "model.vocab_size": ["null", "264", "320", "1000", "100"],
    "model.num_layers": ["1", "2", "3"],
    "model.layer_types": ["[]", "[full_attention]", "[sliding_attention, full_attention]"],
    "model.embed_dim": ["8", "16", "24", "32", "48", "2"],
    "model.mlp_dim": ["8", "32", "40", "64", "1"],
    "model.num_heads": ["1", "2", "4", "8", "3"],
    "model.num_kv_heads": ["1", "2", "4", "8"],
    "model.head_dim": ["null", "2", "6", "8", "16", "128", "7"],
    "model.max_length": ["16", "32", "64", "8192", "2147483647"],
    "model.rope_original_length": ["1", "16", "8192", "2147483647"],
    "model.rope.short_factors": ["[]", "[1, 1, 1, 2]", "[1, 0, 1, 2]"],
    "model.rope.long_factors": ["[]", "[1, 2, 4, 8]", "[1]"],
    "model.latent.kv_rank": ["4", "16", "512"],
    "model.latent.query_rank": ["null", "4", "16"],
    "model.latent.rope_dim": ["2", "4", "7"],
    "model.latent.value_dim": ["1", "8", "128"],
    "model.moe.num_experts": ["1", "2", "8", "6"],
    "model.moe.experts_per_token": ["1", "2", "3"],
    "model.moe.expert_dim": ["null", "8", "1", "32"],
    "model.moe.shared_dim": ["0", "8", "1"],
    "model.moe.num_groups": ["1", "2", "3"],
    "model.moe.top_groups": ["1", "2"],
    "model.moe.dense_layers": ["0", "1", "5"],
    "model.lora.rank": ["null", "1", "4", "64"],
    "model.lora.dropout": ["0", "0.1", "0.9", "1"],
    "model.lora.targets": ["[attention]", "[mlp]", "['.']", "[nothing]", "[]"],
    "model.lora.base_block": ["1", "2", "4", "8", "7", "64"],
    "model.routing.capacity_factor": ["null", "0.1", "1", "100"],
    "regularization.router_noise_steps": ["null", "1", "100"],
    "model.loss_chunk": ["0", "1", "7", "64", "2048", "2147483647"],
    "init.mup_base_width": ["null", "8", "16", "1000000"],
    "init.mup_base_head_dim": ["null", "2", "8", "1000000"],
    "init.mup_base_depth": ["null", "1", "2", "1000000"],
    "data.seq_length": ["32", "16", "24", "64", "1", "2", "33", "128"],
    "data.batch_size": ["8", "16", "24", "32", "12", "1"],
    "data.packing": ["stream", "bins", "pad", "balanced"],
    "data.balance_rows": ["1", "2", "8", "24"],
    "data.balance_quadratic": ["null", "0", "1e-4", "0.1"],
    "data.on_long": ["skip", "truncate", "raise"],
    "data.corruption.token_id": ["null", "0", "5", "255", "100000"],
    "data.prefetch": ["1", "2", "7", "1024"],
    "data.fill_patience": ["1", "2", "8", "1000"],
    "data.stages": [
        "[]",
        "[{until: 1}, {batch_size: 16}]",
        "[{until: 1, seq_length: 16}, {seq_length: 32}]",
        "[{until: 0.5, unit: fraction, weights: {text: 1}}, {}]",
        "[{until: 256, unit: tokens}, {weights: {text: 2}}]",
        "[{until: 3}, {}]",
    ],
    "eval.batch_size": ["null", "8", "16", "3"],
    "eval.seq_length": ["null", "16", "32", "33", "64"],
    "eval.sets": ["{}"],
    "train.only": ["[]", "[mlp]", "[attention, norm]", "['.']", "[nothing]"],
    "train.freeze": ["[]", "[embed]", "[norm, attention]", "['.']", "[nothing]"],
    "optimizer.no_decay": ["[]", "[embed]", "[norm, attention]", "['.']", "[nothing]"],
    "optimizer.groups": [
        "{}",
        "{a: {pattern: embed, lr_factor: 0}}",
        "{a: {pattern: attention, lr_factor: 0.5}, b: {pattern: mlp, weight_decay: 0}}",
        "{a: {pattern: .}}",
        "{a: {pattern: embed}, b: {pattern: emb}}",
        "{a: {pattern: nothing}}",
    ],
    "optimizer.accumulation": ["1", "2", "4", "8", "3", "auto"],
    "optimizer.learning_rate": ["1e-3", "1e-2", "3e-4", "1e-37", "1e6"],
    "schedule.warmup_steps": ["0", "1", "2", "100"],
    "schedule.min_lr_ratio": ["0.1", "0", "0.5", "1"],
    "schedule.min_learning_rate": ["null", "0", "1e-5", "1e-4", "1"],
    "schedule.timescale": ["null", "1", "7", "2147483647"],
    "schedule.pieces": [
        "[]",
        "[{}]",
        "[{name: constant, until: 0.5, unit: fraction}, {name: linear}]",
        "[{name: polynomial, power: 3, until: 1, end: 0.5}, {name: inverse_sqrt, end: 0.1}]",
        "[{name: exponential, end: 0}]",
        "[{start: 2, end: 0.1, name: cosine}]",
    ],
    "loss.adversarial_steps": ["1", "2", "3"],
    "mesh.data": ["1", "2", "4", "8", "-1"],
    "mesh.fsdp": ["1", "2", "4", "8", "-1"],
    "mesh.tensor": ["1", "2", "4", "8", "-1"],
    "mesh.context": ["1", "2", "4"],
    "mesh.expert": ["1", "2", "4", "-1"],
    "mesh.stage": ["1", "2", "4"],
    # Of the model's width, which most arrays have; of what else arrays are split by; and of others.
    "mesh.rules.embed": ["[]", "[fsdp, tensor]", "[data, fsdp]", "[fsdp, context, expert]"],
    "mesh.rules.expert_embed": ["[]", "[fsdp, data]", "[context]"],
    "mesh.rules.vocab": ["[]", "[tensor]", "[tensor, data]"],
    "mesh.rules.mlp": ["[]", "[tensor, data]", "[fsdp]", "[context, tensor]"],
    "mesh.rules.heads": ["[]", "[fsdp]", "[data]"],
    "mesh.rules.kv_heads": ["[]", "[fsdp]", "[data]"],
    "mesh.rules.latent": ["[]", "[tensor]"],
    "mesh.rules.exp": ["[]", "[expert, data]", "[tensor]"],
    **{
        f"mesh.rules.{name}": ["[]", "[fsdp]", "[data, data]", "[tensor]"]
        for name in ("positions", "head_dim", "rank", "norm", "router")
    },
    "model.pipeline.micro_batches": ["null", "1", "2", "4"],
    "model.pipeline.rounds": ["1", "2"],
    "model.pipeline.schedule": ["gpipe", "1f1b"],
    "model.kept.on_device": ["[]", "[attention]", "[qkv, gate_up]", "[product]"],
    "model.kept.on_host": ["[]", "[attention]", "[product]"],
    "model.routing.exchange_factor": ["null", "0.1", "1", "100"],
    "checkpoint.init_from": ["null", "{folder}/runs/base", "{folder}/exported", "{folder}/none"],
    "checkpoint.fork_from": ["null", "{folder}/runs/base", "{folder}/runs/base@2", "{folder}/none"],
    "checkpoint.init_partial": ["[]", "[mlp]", "['.']", "[nothing]"],
    "distill.teacher": ["{folder}/runs/base", "{folder}/exported", "{folder}/none"],
    "distill.stored": ["null", "base", "none"],
    "distill.top": ["1", "2", "8", "64", "65536"],
    "distill.num_generations": ["1", "2", "3"],
    "distill.max_completion_length": ["1", "4", "8", "31", "32"],
    "distill.slots": ["1", "3", "64", "65536"],
    "distill.num_iterations": ["1", "2", "1000"],
    "dpo.reference": ["null", "{folder}/runs/base", "{folder}/exported", "{folder}/none"],
    "grpo.reference": ["null", "{folder}/runs/base", "{folder}/none"],
    "ppo.reference": ["null", "{folder}/runs/base", "{folder}/none"],
    "grpo.rewards": [
        "['length(max_tokens=6)']",
        "['length(max_tokens=6)', 'overlong(max_tokens=6, cache_tokens=2)']",
        "[exact, 'length(max_tokens=6)']",
        "[gsm8k]",
        "[benchmarks.additions.task:score]",
        "[]",
        "[unknown]",
        "[benchmarks.additions.task:nothing]",
    ],
    "grpo.reward_environment": ["[]", "[HOME]", "[NO_SUCH_VARIABLE]"],
    "grpo.reward_weights": ["[]", "[1]", "[1, 0.5]", "[-1]", "[0]"],
    "grpo.num_generations": ["2", "4", "3", "1", "65536"],
    "grpo.max_completion_length": ["1", "4", "8", "31", "32"],
    "grpo.slots": ["1", "3", "64", "65536"],
    "grpo.num_iterations": ["1", "2", "1000"],
    "grpo.dynamic_sampling": ["0", "1", "3"],
    "observe.prompts": ["[]", "[the, of]", "['']"],
    "observe.sample_interval": ["0", "1", "2", "100"],
    "observe.num_samples": ["0", "1", "4", "1000"],
    "observe.profile": ["null", "1:1", "2:1", "1:2", "x", "5:9"],
    "observe.progress": ["plain", "off", "auto", "rich"],
    "checkpoint.keep": ["1", "2", "3"],
    "checkpoint.local_keep": ["2", "3"],
    "checkpoint.upload_every": ["2", "10"],
}
# Values that need a device that this machine does not have.
FOREIGN = {"model.attention": ["cudnn", "triton", "mosaic", "flash"]}
_PREFERENCES = ("data.packing=bins", "data.on_long=skip")
_PROMPTS = ("data.packing=pad", "data.on_long=truncate", "data.seq_length=32", "eval.sets={}")
_OF_PROMPTS = ("data.sources.text.path={folder}/prompts", *_PROMPTS)
_OF_PAIRS = (
    "data.sources.text.path={folder}/pairs/train",
    "eval.sets.heldout.path={folder}/pairs/eval",
    *_PREFERENCES,
)
_OF_LABELS = (
    "data.sources.text.path={folder}/labels/train",
    "eval.sets.heldout.path={folder}/labels/eval",
    *_PREFERENCES,
)
_GRPO = (
    "objective=grpo",
    "grpo.rewards=['length(max_tokens=6)']",
    "grpo.num_generations=2",
    "grpo.max_completion_length=6",
    *_OF_PROMPTS,
)
# The objectives, each with what it needs to begin; all but the first draw from sections of theirs.
OBJECTIVES: Sequence[tuple[str, Sequence[str]]] = (
    ("", ()),
    ("dpo", ("objective=dpo", "dpo.reference={folder}/runs/base", *_OF_PAIRS)),
    ("dpo", ("objective=dpo", "checkpoint.init_from={folder}/runs/base", *_OF_PAIRS)),
    ("dpo", ("objective=dpo", "model.lora.rank=2", *_OF_PAIRS)),
    (
        "dpo",
        (
            "objective=dpo",
            "dpo.loss_type=kto",
            "checkpoint.init_from={folder}/exported",
            *_OF_LABELS,
        ),
    ),
    ("reward", ("objective=reward", "model.score=true", *_OF_PAIRS)),
    (
        "reward",
        (
            "objective=reward",
            "model.score=true",
            "checkpoint.init_from={folder}/runs/base",
            *_OF_PAIRS,
        ),
    ),
    ("distill", ("objective=distill", "distill.teacher={folder}/runs/base")),
    (
        "distill",
        (
            "objective=distill",
            "distill.stored=base",
            "data.sources.text.path={folder}/taught/train",
            *_PREFERENCES,
        ),
    ),
    (
        "distill",
        (
            "objective=distill",
            "distill.teacher={folder}/exported",
            "distill.on_policy=true",
            "distill.weight=1",
            "distill.max_completion_length=6",
            *_OF_PROMPTS,
        ),
    ),
    ("grpo", _GRPO),
    ("grpo", (*_GRPO, "checkpoint.init_from={folder}/runs/base", "grpo.beta=0.1")),
    (
        "grpo ppo",
        (
            "objective=ppo",
            "model.value=true",
            "checkpoint.init_from={folder}/runs/base",
            *_GRPO[1:],
        ),
    ),
)
# Sections that only some objectives read.
SECTIONS_OF_OBJECTIVES = ("distill", "dpo", "reward", "grpo", "ppo")
# Keys that belong together, and are drawn together more often than by chance.
THEMES: Sequence[Sequence[str]] = (
    ("mesh.data=-1", "mesh.fsdp=1", "optimizer.zero=1"),
    ("mesh.data=4", "mesh.fsdp=2", "optimizer.zero=2"),
    ("mesh.data=8", "mesh.fsdp=1", "optimizer.zero=3"),
    ("mesh.tensor=2", "mesh.fsdp=2", "mesh.data=2", "model.vocab_size=264"),
    (
        "mesh.tensor=8",
        "mesh.fsdp=1",
        "mesh.data=1",
        "model.vocab_size=264",
        "model.num_heads=8",
        "model.num_kv_heads=8",
    ),
    ("mesh.stage=2", "mesh.fsdp=2", "mesh.data=2", "model.vocab_size=264", "model.num_layers=2"),
    ("model.remat=named",),
    ("mesh.rules.embed=[]", "mesh.rules.mlp=[fsdp, tensor]", "mesh.rules.heads=[data]"),
    ("mesh.context=2", "mesh.fsdp=2", "mesh.data=2", "mesh.rules.embed=[context, fsdp]"),
    ("mesh.dcn_data=2", "mesh.data=1", "mesh.fsdp=-1"),
    ("mesh.dcn_fsdp=2", "mesh.data=2", "mesh.fsdp=-1"),
    ("mesh.dcn_stage=2", "mesh.data=1", "mesh.fsdp=-1", "model.num_layers=2"),
    ("mesh.dcn_data=2", "mesh.data=-1", "mesh.fsdp=1", "optimizer.zero=1"),
    ("mesh.dcn_data=4", "mesh.data=1", "mesh.fsdp=-1"),
    ("checkpoint.init_from={folder}/runs/base",),
    ("checkpoint.init_from={folder}/exported", "model.lora.rank=2"),
    (
        "checkpoint.init_from={folder}/runs/base",
        "checkpoint.init_partial=[mlp]",
        "model.mlp_dim=40",
    ),
    ("observe.prompts=[the, of]", "observe.sample_interval=1"),
    ("observe.profile=1:2", "observe.layer_norms_interval=1", "observe.plot=true"),
    ("mesh.preset=hsdp", "optimizer.zero=1", "mesh.data=1", "mesh.fsdp=-1"),
    ("mesh.preset=moe", "model.family=mixtral", "mesh.data=1", "mesh.fsdp=-1"),
    ("mesh.preset=long_context", "model.attention=ring", "mesh.data=1", "mesh.fsdp=-1"),
    ("precision.params=bfloat16", "optimizer.stochastic_rounding=true"),
    ("optimizer.on_host=true", "optimizer.ema_decay=0.9"),
    ("optimizer.on_host=true", "optimizer.zero=1", "mesh.data=4", "mesh.fsdp=2"),
    (
        "train.on_host=all",
        "optimizer.on_host=true",
        "model.remat=dots",
        "model.scan_layers=true",
        "mesh.data=2",
        "mesh.fsdp=4",
    ),
    ("train.on_host=frozen", "model.lora.rank=2", "model.remat=full", "model.scan_layers=true"),
    ("precision.activations=bfloat16", "model.remat=dots_no_batch"),
    ("precision.compute=float16", "loss_scale.mode=dynamic", "loss_scale.initial=1024"),
    ("precision.compute=float32", "loss_scale.mode=static", "loss_scale.initial=8"),
    ("determinism=full", "integrity.repeat_interval=1"),
    ("integrity.replicas_interval=1",),
    ("data.packing=bins", "data.on_long=truncate"),
    ("data.packing=pad", "data.on_long=truncate"),
    ("data.packing=balanced", "data.on_long=truncate", "data.balance_rows=8"),
    (
        "data.packing=balanced",
        "data.on_long=skip",
        "data.balance_rows=8",
        "optimizer.normalize=sequences",
    ),
    ("data.packing=bins", "data.on_long=truncate", "optimizer.normalize=sequences"),
    ("optimizer.name=muon",),
    ("optimizer.name=adafactor",),
    ("optimizer.ema_decay=0.9",),
    ("init.name=normal", "init.std=0.02"),
    ("init.mup_base_width=8", "init.mup_base_depth=2", "init.mup_base_head_dim=4"),
    ("loss.adversarial=1", "loss.adversarial_steps=2"),
    (
        "loss.by_source=true",
        "data.sources.more.path={folder}/more/data/train",
        "data.sources.more.weight=0.5",
    ),
    (
        "schedule.name=pieces",
        "schedule.pieces=[{until: 0.5, unit: fraction}, {start: 1}]",
        "schedule.warmup_steps=0",
    ),
    ("model.attention=eager", "regularization.attention_dropout=0.1"),
    ("model.attention=auto", "regularization.attention_dropout=0.1"),
    ("model.attention=auto", "mesh.context=2", "mesh.data=1", "mesh.fsdp=-1"),
    (
        "regularization.residual_dropout=0.1",
        "regularization.embedding_noise=5",
        "regularization.stochastic_depth=0.5",
    ),
    ("data.corruption.rate=0.3", "data.corruption.span=3"),
    ("anomaly.loss_spike=rollback", "anomaly.min_steps=4", "anomaly.window=4"),
    ("checkpoint.asynchronous=false",),
    ("checkpoint.keep_best=true", "checkpoint.keep=1"),
    ("checkpoint.copy_to={folder}/second",),
    # Refused: the runs here are on a disk.
    ("checkpoint.local={folder}/fast", "checkpoint.local_keep=2", "checkpoint.upload_every=2"),
    ("model.rope_scaling=llama3",),
    ("model.rope_scaling=linear",),
    ("model.rope_scaling=dynamic", "model.rope_original_length=16"),
    ("model.rope_scaling=yarn", "model.rope.mscale=1", "model.rope.mscale_all_dim=0.5"),
    (
        "model.rope_scaling=longrope",
        "model.rope_original_length=16",
        "model.head_dim=8",
        "model.rope.short_factors=[1, 1, 1, 2]",
        "model.rope.long_factors=[1, 2, 4, 8]",
    ),
    ("model.tie_embeddings=true",),
    ("model.lora.rank=4",),
    ("model.lora.rank=4", "model.lora.magnitudes=true", "model.lora.targets=[mlp]"),
    ("model.lora.rank=4", "model.lora.base=int8", "model.lora.base_block=4"),
    (
        "model.lora.rank=4",
        "model.lora.base=nf4",
        "model.lora.base_block=2",
        "model.family=mixtral",
    ),
    ("model.family=mistral", "model.window=5"),
    (
        "model.family=mistral",
        "model.window=5",
        "model.layer_types=[full_attention,sliding_attention]",
    ),
    ("model.family=qwen2",),
    ("model.family=olmo2",),
    (
        "model.family=gemma2",
        "model.window=5",
        "model.query_pre_attn_scalar=7",
        "model.attention_softcap=5",
        "model.logit_softcap=3",
    ),
    ("model.family=gemma3", "model.window=5", "model.rope.local_theta=100"),
    ("model.family=mixtral", "model.window=5", "model.routing.z_loss=0.01"),
    ("model.family=qwen2_moe", "model.moe.shared_dim=8", "model.routing.capacity_factor=1.1"),
    ("model.family=qwen3_moe", "model.moe.num_experts=4", "model.routing.kernel=ragged"),
    (
        "model.family=mixtral",
        "model.moe.num_experts=8",
        "mesh.data=1",
        "mesh.fsdp=2",
        "mesh.expert=4",
        "model.routing.exchange_factor=0.5",
    ),
    (
        "model.family=qwen3_moe",
        "model.moe.num_experts=4",
        "mesh.data=1",
        "mesh.fsdp=1",
        "mesh.expert=4",
        "mesh.tensor=2",
        "model.vocab_size=264",
    ),
    (
        "model.family=qwen3_moe",
        "regularization.router_noise=gumbel",
        "regularization.router_noise_scale=0.3",
        "regularization.router_noise_steps=5",
    ),
    ("model.family=deepseek_v2", "model.head_dim=12", "model.latent.rope_dim=4"),
    (
        "model.family=deepseek_v3",
        "model.head_dim=12",
        "model.latent.rope_dim=4",
        "model.latent.query_rank=16",
        "model.moe.num_groups=2",
        "model.moe.dense_layers=1",
    ),
    ("model.family=gpt_oss", "model.window=5"),
    ("model.family=gpt2",),
    ("model.scan_layers=false", "model.remat=dots"),
    ("data.workers=1",),
    ("steps=auto", "data.sources.text.epochs=0.1"),
    (
        "steps=auto",
        "data.sources.text.epochs=0.05",
        "data.on_exhausted=repeat",
        "data.stages=[{until: 3}]",
    ),
    ("steps=1",),
    ("steps=3", "checkpoint_interval=2", "eval.sets.heldout.interval=1"),
    ("checkpoint_interval=0",),
    ("checkpoint.minutes=1e-37", "checkpoint_interval=0"),
    ("log_interval=2",),
    ("log_interval=3", "steps=4"),
    ("eval.sets.heldout.steps=-1", "eval.sets.heldout.batch_size=16"),
    ("eval.sets.heldout.interval=0",),
    ("eval.sets.again.path={folder}/data/eval", "eval.sets.again.interval=1"),
    ("data.sources.more.path={folder}/more/data/train", "data.sources.text.weight=1e-37"),
    (
        "data.sources.more.path={folder}/more/data/train",
        "data.sources.more.weight=3e38",
        "data.on_exhausted=error",
    ),
    ("observe.prompts=[the, of]",),
)


class FuzzedKey(NamedTuple):
    """A key that is drawn, and its values as one would type them."""

    path: str
    values: Sequence[str]


class FuzzOutcome(NamedTuple):
    """Outcome of a trial."""

    # "ended": with a message. "refused": nothing was left to remove. "found": a bug.
    kind: Literal["trained", "ended", "refused", "found"]
    # The message, or a description of the bug.
    words: str
    overrides: Sequence[str]
    # How often the checks refused the config before.
    refusals: int


def drawn_keys(section: Any = None, prefix: str = "") -> list[FuzzedKey]:
    """Every key of the schema that trials draw, with candidates for its value."""
    found = []
    for field in dataclasses.fields(section or RunConfig):
        path = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            found += drawn_keys(field.type, f"{path}.")
        elif not NOT_DRAWN.fullmatch(path) and (path in HINTS or element(field.type) is None):
            found.append(FuzzedKey(path, HINTS.get(path) or _values(path, field)))
    return found


def _values(path: str, field: Any) -> list[str]:
    """Values of a key without a hint: every choice; of a number the ends of its range, the default
    and some between."""
    options = [*typing.get_args(field.type)] or [field.type]
    values = []
    for option in options:
        if isinstance(option, str):
            values.append(option)
        elif typing.get_origin(option) is Literal:
            values += typing.get_args(option)
        elif option is bool:
            values += ["true", "false"]
        elif option is type(None):
            values.append("null")
        elif option is int:
            low, high = _limits(field, 0, 2**31 - 1)
            values += [str(n) for n in (low, low + 1, 2, 3, 5, high) if low <= n <= high]
        elif option is float:
            low, high = _limits(field, 1.2e-38, 3.4e38)
            default = 0.5
            if isinstance(field.default, float):
                default = field.default
            usual = (low, default, default, 0.1, 0.5, 0.9, high)
            values += [str(x) for x in usual if low <= x <= high]
    return [value for value in dict.fromkeys(values) if value not in FOREIGN.get(path, ())]


def _limits(field: Any, low: float, high: float) -> tuple[Any, Any]:
    """The range of a key, with these ends where it has none of its own."""
    if field.metadata["low"] is not None:
        low = field.metadata["low"]
    if field.metadata["high"] is not None:
        high = field.metadata["high"]
    return low, high


def draw(rng: random.Random, folder: Path) -> list[str]:
    """The overrides of a trial."""
    sections, needed = "", ()
    if rng.random() < 0.5:
        sections, needed = rng.choice(OBJECTIVES[1:])
    chosen: dict[str, str] = {}
    for theme in (needed, *rng.sample(THEMES, rng.choice((0, 1, 1, 2, 3)))):
        for override in theme:
            path, _, value = override.partition("=")
            chosen.setdefault(path, value)
    keys = drawn_keys()
    own = [key for key in keys if key.path.split(".")[0] in sections.split()]
    for key in rng.sample(own, min(len(own), rng.choice((0, 1, 2, 4)))):
        # A reward replaces the one that the objective begins with; what it needs stays.
        chosen[key.path] = rng.choice(key.values)
    for key in rng.sample(keys, rng.choice((0, 2, 4, 8, 16, 24))):
        is_foreign = key.path.split(".")[0] in SECTIONS_OF_OBJECTIVES and key not in own
        if not is_foreign or rng.random() < 0.05:
            chosen.setdefault(key.path, rng.choice(key.values))
    return [f"{path}={value}".replace("{folder}", str(folder)) for path, value in chosen.items()]


def accepted(words: Sequence[str], overrides: Sequence[str]) -> tuple[list[str] | None, int]:
    """Removes what the checks refuse, until they accept the rest.

    Returns:
        The overrides that are left, or None if none of them is to blame; and the number of
        refusals.

    Raises:
        AssertionError: a refusal does not say what to change.
    """
    left = list(overrides)
    for refusals in range(MOST_REFUSALS):
        try:
            load_config([*words, *left])
            return left, refusals
        except ConfigError as error:
            for problem in error.problems:
                assert ADVICE.search(problem.partition(". ")[2] or problem), f"no advice: {problem}"
            text = "\n".join(error.problems)
            named = [override for override in left if _is_named(override, text)]
            if not named:
                return None, refusals + 1
            left.remove(named[-1])
    return None, MOST_REFUSALS


def _is_named(override: str, text: str) -> bool:
    """Return whether a text has the key of an override."""
    key, _, _ = override.partition("=")
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", text) is not None


def first_run(
    words: Sequence[str],
    runs: Path,
    name: str,
    overrides: Sequence[str],
    run: Callable[[Sequence[str]], tuple[int | str, str]],
) -> FuzzOutcome:
    """Trains a config once, without the overrides that are refused; the arguments are those of
    `trial`."""
    left = list(overrides)
    refusals = 0
    words_of_end = ""
    while refusals < MOST_REFUSALS:
        try:
            agreed, more = accepted(words, left)
        except Exception as error:
            # Anything but a ConfigError is a bug.
            return FuzzOutcome("found", f"loading: {type(error).__name__}: {error}", left, refusals)
        refusals += more
        if agreed is None:
            return FuzzOutcome("refused", "", left, refusals)
        left = agreed
        code, said = run([*words, f"run_name={name}", *left])
        if wrong := _wrong(code, said):
            return FuzzOutcome("found", wrong, left, refusals)
        if not code:
            return FuzzOutcome("trained", "", left, refusals)
        words_of_end = f"exit {code}: {_message(said)}"
        if code != 78:
            return FuzzOutcome("ended", words_of_end, left, refusals)
        named = [override for override in left if _is_named(override, _message(said))]
        if not named:
            break
        # Only the run itself can compare a config with data, devices or another model.
        left.remove(named[-1])
        refusals += 1
        shutil.rmtree(runs / name, ignore_errors=True)
    return FuzzOutcome("refused", words_of_end, left, refusals)


def trial(
    words: Sequence[str],
    runs: Path,
    name: str,
    overrides: Sequence[str],
    run: Callable[[Sequence[str]], tuple[int | str, str]],
) -> FuzzOutcome:
    """Trains a config, and then resumes it from the checkpoint before its last; with one alone, it
    begins again.

    Args:
        words: of the command line that every trial has.
        runs: where the run directories are.
        name: of the run.
        overrides: what is tried.
        run: runs the command with these words; gives its exit code, or "hangs", and its output.
    """
    outcome = first_run(words, runs, name, overrides, run)
    if outcome.kind != "trained":
        return outcome
    left = outcome.overrides
    refusals = outcome.refusals
    command = [*words, f"run_name={name}", *left]
    folder = runs / name
    first = folder.with_name(f"{name}-first")
    shutil.copytree(folder, first)
    config = load_config(command)
    steps = sorted(saved_digests(folder / "checkpoints"))
    last = max(steps, default=0)
    places = [folder / "checkpoints"]
    if config.checkpoint.copy_to:
        places.append(Path(config.checkpoint.copy_to, name, "checkpoints"))
    for place in places:
        if len(steps) > 1:
            shutil.rmtree(complete(place)[last])
        else:
            shutil.rmtree(place.parent)
    code, said = run(command)
    if code:
        return FuzzOutcome(
            "found", f"the resumed run: exit {code}: {_message(said)}", left, refusals
        )
    if "Nothing to do" in said:
        return FuzzOutcome("found", "the resumed run had nothing to do", left, refusals)
    different = [
        field.name
        for field in compare_records(read_metrics(first), read_metrics(folder))
        if field.different
    ]
    step, count, arrays = compare_arrays(
        saved_digests(first / "checkpoints"), saved_digests(folder / "checkpoints")
    )
    if different or arrays or (step, bool(count)) != (last, True):
        words_of = f"records {different}, arrays {arrays[:5]}, step {step} with {count} arrays"
        return FuzzOutcome("found", f"the resumed run is another one: {words_of}", left, refusals)
    for done in (folder, first, *(place.parent for place in places)):
        shutil.rmtree(done, ignore_errors=True)
    return FuzzOutcome("trained", "", left, refusals)


def _wrong(code: int | str, said: str) -> str:
    """Return the problem with how a command ended; empty if there is none."""
    if "Traceback" in said:
        return f"a traceback: {said.strip().splitlines()[-1][:300]}"
    if code not in (0, 65, 70, 78):
        return f"ended with {code}: {_message(said)}"
    if code and not ADVICE.search(_message(said)):
        return f"exit {code} without advice: {_message(said)}"
    return ""


def _message(said: str) -> str:
    """The error that a command ends with."""
    _, found, message = said.rpartition("error:")
    if not found:
        return message.strip()[-300:]
    return f"{found}{message}".strip()[:600]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trials and prints what came of them; 1 if there is a find."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--folder", type=Path, help="for data and runs; default: a temporary one")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fuzz-configs-"))
    scene = make_scene(folder)
    jax.config.update("jax_disable_most_optimizations", True)
    counts: collections.Counter[str] = collections.Counter()
    for number in range(options.first, options.first + options.trials):
        begin = time.monotonic()
        name = f"{options.seed}-{number}"
        overrides = draw(random.Random(name), folder)
        make_materials(scene, overrides)
        run = functools.partial(_forked, scene, name)
        outcome = trial([f"config={scene.config}"], scene.runs, name, overrides, run)
        counts[outcome.kind] += 1
        counts["refused first"] += bool(outcome.refusals)
        seconds = time.monotonic() - begin
        print(f"{name}: {outcome.kind} in {seconds:.0f} s {outcome.words}", flush=True)
        if outcome.kind != "trained":
            print("   ", shlex.join(outcome.overrides), flush=True)
        shutil.rmtree(folder / "cache", ignore_errors=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return int(counts["found"] > 0)


def make_scene(folder: Path) -> Scene:
    """Two sets of data, and the config that trials begin with."""
    # So little text that some documents fit into a row, and some don't.
    scene = Scene(folder, 0.006, **CHANGES)
    # Twice as many trials in the same time.
    scene.environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    (folder / "second").mkdir(exist_ok=True)
    if not (folder / "more").exists():
        make_data(folder / "more", 0.005)
    return scene


def make_materials(scene: Scene, overrides: Sequence[str]) -> None:
    """Makes what these overrides name and what no earlier trial needed: pairs of answers, answers
    with labels, prompts, data with a stored teacher, a trained model, the same as exported files.

    Raises:
        RuntimeError: a command that makes one of them failed.
    """
    named = "\n".join(overrides)
    for name, make in MATERIALS.items():
        place = scene.folder / name
        if str(place) in named and not place.exists():
            make(scene, place)


def _make_base(scene: Scene, place: Path) -> None:
    _run_command(scene, place, "maxtrain.train", *scene.words(place.name))


def _make_exported(scene: Scene, place: Path) -> None:
    make_materials(scene, [str(scene.runs / "base")])
    _run_command(scene, place, "maxtrain", "export", str(scene.runs / "base"), str(place))


def _make_taught(scene: Scene, place: Path) -> None:
    make_materials(scene, [str(scene.runs / "base")])
    making = place.with_name("teaching")
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(scene.folder / "data", making)
    words = [str(scene.runs / "base"), str(making / "train"), "--name", "base", "--top", "8"]
    _run_command(scene, place, "maxtrain", "teach", *words)
    making.rename(place)


def _make_pairs(scene: Scene, place: Path) -> None:
    rng = random.Random(0)
    rows = []
    for _ in range(120):
        answers = {"chosen": " yes", "rejected": f" no {rng.choice(WORDS)}"}
        rows.append({"prompt": _question(rng), **answers, "margin": rng.random()})
    _prepare(scene, place, rows, "--preferences", "--margin", "--holdout", "0.2")


def _make_labels(scene: Scene, place: Path) -> None:
    rng = random.Random(1)
    rows = []
    for number in range(160):
        answer = " yes" if number % 2 == 0 else f" no {rng.choice(WORDS)}"
        rows.append({"prompt": _question(rng), "completion": answer, "label": number % 2 == 0})
    _prepare(scene, place, rows, "--preferences", "--holdout", "0.2")


def _make_prompts(scene: Scene, place: Path) -> None:
    sums = [(a, b) for a in range(5) for b in range(5)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    _prepare(scene, place, rows, "--prompts")


def _question(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=3)) + "?"


def _prepare(scene: Scene, place: Path, rows: Sequence[dict], kind: str, *options: str) -> None:
    source = place.with_suffix(".jsonl")
    source.write_text("\n".join(map(json.dumps, rows)))
    words = [str(place), kind, str(source), "--tokenizer", "bytes", "--workers", "1", *options]
    _run_command(scene, place, "data_pipeline.prepare", *words)


def _run_command(scene: Scene, place: Path, module: str, *words: str) -> None:
    """Runs `python -m module words`, which makes a place."""
    environment = {**os.environ, **scene.environment, "PYTHONPATH": str(ROOT)}
    with open(scene.log(place.name), "wb") as log:
        ended = subprocess.run(
            [sys.executable, "-m", module, *words], stdout=log, stderr=log, env=environment
        )
    if ended.returncode:
        raise RuntimeError(f"{place} could not be made; see {scene.log(place.name)}")


# What trials read beside the two sets of data, by its place in the folder.
MATERIALS: dict[str, Callable[[Scene, Path], None]] = {
    "runs/base": _make_base,
    "exported": _make_exported,
    "taught": _make_taught,
    "pairs": _make_pairs,
    "labels": _make_labels,
    "prompts": _make_prompts,
}


def _forked(scene: Scene, name: str, words: Sequence[str]) -> tuple[int | str, str]:
    """A run in a process forked from this one, or in two of them if it has slices."""
    log = scene.log(name)
    log.unlink(missing_ok=True)
    overrides = [word for word in words if not word.startswith(("config=", "run_name="))]
    if not any(override.startswith("mesh.dcn_") for override in overrides):
        code = end(scene.start(name, *overrides))
        return code, log.read_text(errors="replace")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    overrides += [f"mesh.simulated_devices={DEVICES // 2}", "mesh.num_processes=2"]
    overrides += [f"mesh.coordinator={coordinator}"]
    both = [scene.start(name, *overrides, f"mesh.process_id={index}") for index in range(2)]
    codes = [end(process) for process in both]
    return max(codes, key=str), log.read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
