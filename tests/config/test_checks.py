"""Rules across keys: every message has the value and the mend, and all come at once."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError
from maxtrain.config import fit_to_devices, fit_to_fewer, load_config

FIXED = {
    "steps": "300",
    "eval_interval": "100",
    "data.batch_size": "16",
    "schedule.warmup_steps": "30",
}


def load(*overrides: str):
    """The quickstart with the numbers above, which may be tuned there, and these overrides."""
    given = dict(override.split("=", 1) for override in overrides)
    return load_config(
        ["config=quickstart", *(f"{key}={value}" for key, value in (FIXED | given).items())]
    )


def problems(*overrides: str) -> list[str]:
    """The problems of `load`."""
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert caught.value.exit_code == 78
    return caught.value.problems


def pieces(text: str) -> list[str]:
    """The overrides that choose these pieces."""
    return ["schedule.name=pieces", f"schedule.pieces=[{text}]"]


@pytest.mark.parametrize(
    ("overrides", "value", "mend"),
    [
        (
            ["model.attention=cudnn", "determinism=full", "data.packing=pad"],
            "model.attention=cudnn may add in another order each time",
            "Set model.attention to eager or xla, or determinism=seeded.",
        ),
        (
            ["integrity.repeat_interval=100"],
            "integrity.repeat_interval=100 needs programs that repeat bit for bit",
            "Set determinism=full, or leave it out.",
        ),
        (
            ["model.attention=cudnn"],
            "data.packing=stream puts several into one",
            "Set data.packing=pad, data.attend_across_documents=true to let it, or model.attention=xla.",
        ),
        (
            ["model.attention=cudnn", "data.packing=pad", "precision.compute=float32"],
            "does not multiply precision.compute=float32",
            "Set precision.compute to float16 or bfloat16, or model.attention=xla.",
        ),
        (
            ["model.attention=cudnn", "data.attend_across_documents=true", "model.head_dim=132"],
            "model.attention=cudnn needs heads of at most 128, a multiple of 8, and model.head_dim is 132",
            "Set model.head_dim=64, for example",
        ),
        (
            ["model.attention=flash", "data.seq_length=200"],
            "model.attention=flash needs rows of a multiple of 128 tokens, and data.seq_length is 200",
            "Set data.seq_length to 128 or 256, or model.attention=xla.",
        ),
        # limits of single keys
        (
            ["data.batch_size=0"],
            "data.batch_size=0 must be at least 1",
            "Set data.batch_size to at least 1",
        ),
        (["steps=0"], "steps=0 must be at least 1", "Set steps to at least 1"),
        (["seed=-1"], "seed=-1", "Set seed to at least 0"),
        (
            ["seed=1e10"],
            "seed=10000000000 must be at most 4294967295",
            "Set seed to at most 4294967295",
        ),
        (
            ["optimizer.learning_rate=0"],
            "optimizer.learning_rate=0.0 must be more than 0",
            "Set optimizer.learning_rate to more than 0",
        ),
        (
            ["schedule.decay_fraction=1.5"],
            "schedule.decay_fraction=1.5 must be at most 1",
            "to at most 1",
        ),
        (["data.sources.stdlib.weight=-1"], "data.sources.stdlib.weight=-1.0", "to at least 0"),
        (["eval_steps=-2"], "eval_steps=-2 must be at least -1", "Set eval_steps to at least -1"),
        # the run
        (["run_name=a/b"], "run_name='a/b' must be the name of one folder", "Set run_name=NAME"),
        (["run_name=.."], "run_name='..'", "Set run_name=NAME"),
        (
            ["eval.sets={}"],
            "eval_interval=100 needs an evaluation set",
            "Add eval.sets.NAME.path=DIR, or set eval_interval=0",
        ),
        (
            ["eval_steps=0"],
            "eval_steps=0 would evaluate nothing, every eval_interval=100",
            "Set eval_steps=-1",
        ),
        (
            ["anomaly.min_steps=200"],
            "anomaly.min_steps=200 must be at most anomaly.window=128",
            "Set anomaly.min_steps to at most 128",
        ),
        (
            ["anomaly.window=300"],
            "anomaly.window=300 must be at most 256",
            "Set anomaly.window to at most 256",
        ),
        (
            ["anomaly.diverging_limit=1"],
            "anomaly.diverging_limit=1.0 must be more than 1",
            "to more than 1",
        ),
        # directories
        (
            ["output_dir=data/stdlib/eval/../train/"],
            "data.sources.stdlib.path=data/stdlib/train",
            "Set output_dir to another",
        ),
        (
            ["output_dir=data/stdlib", "run_name=eval"],
            "eval.sets.heldout.path=data/stdlib/eval",
            "Set output_dir to another",
        ),
        (["data.sources={}"], "data.sources is empty", "Add data.sources.NAME.path=DIR"),
        # model
        (
            ["model.num_kv_heads=3"],
            "model.num_kv_heads=3 must divide model.num_heads=4",
            "to 1, 2 or 4",
        ),
        (
            ["model.embed_dim=250"],
            "model.embed_dim=250 must be an even multiple of model.num_heads=4",
            "to 248 or 256",
        ),
        (["model.head_dim=63"], "model.head_dim=63 must be even", "to 62 or 64"),
        (
            ["data.seq_length=2048"],
            "data.seq_length=2048 must be at most model.max_length=1024",
            "model.max_length=2048",
        ),
        # init
        (["init.name=normal"], "init.name=normal needs init.std", "Set init.std=0.02"),
        (
            ["init.std=0.02"],
            "init.std=0.02 is not used by init.name=lecun_normal",
            "init.name=truncated_normal or normal",
        ),
        (
            ["init.mup_base_depth=2"],
            "init.mup_base_depth=2 needs init.mup_base_width",
            "Set init.mup_base_width=256",
        ),
        (
            ["init.mup_base_head_dim=32"],
            "init.mup_base_head_dim=32",
            "or init.mup_base_head_dim=null",
        ),
        (["init.scale=0"], "init.scale=0.0 must be more than 0", "Set init.scale"),
        (
            ["init.mup_base_width=64", "init.mup_base_depth=2", "optimizer.name=sgd"],
            "init.mup_base_depth=2 has no rule for optimizer.name=sgd",
            "or init.mup_base_depth=null",
        ),
        (
            ["init.scale=2", "checkpoint.init_from=hf"],
            "init.scale=2.0 is not used with checkpoint.init_from=hf",
            "init_from=null",
        ),
        # loss
        (
            ["loss.adversarial_steps=3"],
            "loss.adversarial_steps=3 is not used with loss.adversarial=0",
            "Set loss.adversarial=1",
        ),
        (
            ["model.rope_factor=4"],
            "model.rope_factor=4.0 is not used with model.rope_scaling=none",
            "model.rope_scaling=llama3",
        ),
        (
            ["data.corruption.span=3"],
            "data.corruption.span=3.0 is not used with data.corruption.rate=0",
            "corruption.rate=0.15",
        ),
        (
            ["data.fill_patience=3"],
            "data.fill_patience=3 is not used with data.min_fill=0.0",
            "Set data.min_fill=0.5",
        ),
        (
            ["data.on_long=skip"],
            "data.on_long=skip is not used with data.packing=stream",
            "Set data.packing=bins",
        ),
        (
            ["data.balance_rows=2"],
            "data.balance_rows=2 is for balanced, not for data.packing=stream",
            "Set data.packing=balanced",
        ),
        (
            ["data.packing=balanced", "data.balance_rows=6", "optimizer.accumulation=4"],
            "data.balance_rows=6 must be divisible by optimizer.accumulation=4",
            "Set data.balance_rows to 4 or 8",
        ),
        (
            ["data.packing=balanced", "data.balance_rows=64"],
            "data.balance_rows=64 must be at most data.batch_size=",
            "Set data.balance_rows to ",
        ),
        (
            [
                "data.packing=balanced",
                "loss.by_source=true",
                "data.sources.a.path=a",
                "data.sources.b.path=b",
            ],
            "loss.by_source=true needs rows of one source each, and data.packing=balanced puts",
            "Set loss.by_source=false",
        ),
        (
            ["optimizer.normalize=sequences", "data.attend_across_documents=true"],
            "optimizer.normalize=sequences is a mean over documents, and data.attend_across_documents=true",
            "Set data.attend_across_documents=false",
        ),
        # objective
        (
            ["objective=distill"],
            "objective=distill needs a teacher, but distill.teacher=null",
            "Set distill.teacher to a run of maxtrain",
        ),
        (
            ["distill.teacher=runs/wide"],
            "is not used with objective=next_token",
            "Set objective=distill, or leave it out",
        ),
        (
            ["distill.kind=reverse"],
            "distill.kind=reverse is not used with objective=next_token",
            "Set objective=distill, or leave it out",
        ),
        (
            ["objective=distill", "distill.teacher=runs/wide", "distill.temperature=0"],
            "distill.temperature=0",
            "more than 0",
        ),
        (
            ["objective=distill", "distill.teacher=runs/wide", "distill.weight=1.5"],
            "distill.weight=1.5",
            "at most 1",
        ),
        # regularization
        (
            ["regularization.residual_dropout=1"],
            "regularization.residual_dropout=1.0 must be less than 1",
            "=0.1",
        ),
        (
            ["regularization.attention_dropout=0.1"],
            "regularization.attention_dropout=0.1",
            "Set model.attention=eager",
        ),
        # optimizer
        (
            ["schedule.warmup_steps=300"],
            "schedule.warmup_steps=300 must be less than steps=300",
            "at most 299",
        ),
        (
            ["schedule.min_learning_rate=1"],
            "schedule.min_learning_rate=1.0 must be at most optimizer.learning_rate",
            "Set schedule.min_learning_rate=null",
        ),
        (
            ["schedule.min_learning_rate=1e-5", "schedule.min_lr_ratio=0.2"],
            "schedule.min_lr_ratio=0.2 is not used with schedule.min_learning_rate=1e-05",
            "Set schedule.min_learning_rate=null",
        ),
        (
            ["schedule.min_lr_ratio=2"],
            "schedule.min_lr_ratio=2.0 must be at most 1",
            "Set schedule.min_lr_ratio to at most 1",
        ),
        (["optimizer.beta1=1"], "optimizer.beta1=1.0 must be less than 1", "optimizer.beta1=0.9"),
        (
            ["loss_scale.backoff=1", "loss_scale.mode=dynamic"],
            "loss_scale.backoff=1 must be less than 1",
            "loss_scale.backoff=0.5",
        ),
        (
            ["loss_scale.initial=0.5", "precision.compute=float16"],
            "must be between loss_scale.min=1 and loss_scale.max=4.29497e+09",
            "loss_scale.mode=static",
        ),
        (
            ["loss_scale.window=9"],
            "loss_scale.window=9 is not used by loss_scale.mode=auto with",
            "Set loss_scale.mode=dynamic",
        ),
        (
            ["loss_scale.mode=static", "loss_scale.min=2"],
            "loss_scale.min=2 is not used by loss_scale.mode=static",
            "=dynamic",
        ),
        (
            ["precision.activations=bfloat16", "precision.compute=float16"],
            "precision.activations=bfloat16 rounds the inputs of products to bfloat16, but precision.compute=float16",
            "Set precision.compute=bfloat16, or precision.activations=float32.",
        ),
        (
            ["precision.activations=bfloat16", "precision.compute=float32"],
            "precision.activations=bfloat16 rounds the inputs of products to bfloat16, but precision.compute=float32",
            "Set precision.compute=bfloat16, or precision.activations=float32.",
        ),
        (
            ["precision.params=bfloat16", "optimizer.beta2=0.999"],
            "optimizer.beta2=0.999 changes a moment by less",
            "beta2=0.95",
        ),
        (
            ["optimizer.groups.a.lr_factor=2"],
            "optimizer.groups.a.pattern is empty",
            "optimizer.groups.a.pattern=attention",
        ),
        (
            ["anomaly.drift_limit=0.2"],
            "anomaly.drift_limit=0.2 is not used by anomaly.weight_drift=off",
            "weight_drift=warn",
        ),
        (
            ["anomaly.patience=3", "anomaly.loss_spike=off", "anomaly.grad_spike=off"],
            "anomaly.patience=3 is not used by anomaly.loss_spike=off and anomaly.grad_spike=off",
            "Set anomaly.loss_spike=warn, or leave it out",
        ),
        (
            ["anomaly.max_skipped=3", "anomaly.non_finite=stop"],
            "anomaly.max_skipped=3 is not used by anomaly.non_finite=stop",
            "Set anomaly.non_finite=skip, or leave it out",
        ),
        (
            ["anomaly.leave_out=3"],
            "anomaly.leave_out=3 is for the policy rollback, which no",
            "Set anomaly.loss_spike=rollback",
        ),
        (
            ["anomaly.max_rollbacks=9", "anomaly.loss_spike=skip"],
            "anomaly.max_rollbacks=9 is for the policy rollback",
            "leave it out",
        ),
        (
            ["anomaly.leave_out=3", "data.repeated=skip"],
            "anomaly.leave_out=3 is for the policy rollback",
            "or leave it out",
        ),
        (
            ["optimizer.ema_decay=1"],
            "optimizer.ema_decay=1.0 must be less than 1",
            "optimizer.ema_decay=0.999",
        ),
        (
            ["optimizer.zero=1"],
            "optimizer.zero=1 splits over mesh.data, which is 1",
            "Set mesh.data=-1 and mesh.fsdp=1",
        ),
        (
            ["optimizer.name=muon", "init.mup_base_width=64"],
            "optimizer.name=muon is not for init.mup",
            "name=adamw, adam, lion, sgd",
        ),
        (["optimizer.zero=4"], "optimizer.zero=4 must be at most 3", "to at most 3"),
        (
            ["optimizer.stochastic_rounding=true"],
            "not precision.params=float32",
            "Set precision.params=bfloat16",
        ),
        (
            ["optimizer.name=sgd", "optimizer.eps=1e-3"],
            "eps=0.001 is for adamw, adam or muon, not",
            "Set optimizer.name=adamw",
        ),
        (
            ["optimizer.momentum=0.9"],
            "is for momentum, nesterov or muon, not for optimizer.name=adamw",
            "Set optimizer.name=mom",
        ),
        (
            ["optimizer.no_decay=a**"],
            "optimizer.no_decay=a** must be a regular expression",
            "Set optimizer.no_decay to part of",
        ),
        (
            ["optimizer.no_decay='[[a]]'"],
            "optimizer.no_decay=[[a]] must be a regular expression, but: Possible nested set",
            "Set optimizer.no_decay to part of",
        ),
        (
            ["optimizer.groups.a.pattern=["],
            "optimizer.groups.a.pattern=[ must be a regular",
            "Set optimizer.groups.a.pattern to",
        ),
        (["optimizer.beta2=-0.1"], "optimizer.beta2=-0.1 must be at least 0", "to at least 0"),
        (
            ["schedule.name=wsd", "schedule.decay_fraction=0.95"],
            "schedule.decay_fraction=0.95",
            "at most 0.9",
        ),
        (
            ["schedule.decay_fraction=0.3"],
            "schedule.decay_fraction=0.3 is for wsd",
            "Set schedule.name=wsd",
        ),
        (
            ["schedule.power=1"],
            "schedule.power=1.0 is for polynomial, not for schedule.name=cosine",
            "schedule.name=polynomial",
        ),
        (
            ["checkpoint.init_partial=[head]"],
            "is not used without checkpoint.init_from",
            "Set checkpoint.init_from",
        ),
        (
            ["checkpoint.init_from=a", "checkpoint.init_partial=['(']"],
            "checkpoint.init_partial=( must be a reg",
            "special char",
        ),
        (
            ["checkpoint.copy_keep=2"],
            "checkpoint.copy_keep=2 is not used without checkpoint.copy_to",
            "Set checkpoint.copy_to",
        ),
        (
            ["checkpoint.copy_to=gs://bucket/a"],
            "checkpoint.copy_to=gs://bucket/a must be a directory",
            "to where it is mounted",
        ),
        (
            ["checkpoint.copy_to=runs"],
            "checkpoint.copy_to=runs is output_dir itself",
            "to a directory on another disk",
        ),
        (
            ["checkpoint.copy_to=a/../runs"],
            "checkpoint.copy_to=a/../runs is output_dir itself",
            "to a directory on another disk",
        ),
        (
            ["eval.stop_set=heldout"],
            "eval.stop_set=heldout is not used without eval.stop_patience",
            "Set eval.stop_patience=3",
        ),
        (
            ["eval.stop_patience=3", "eval.stop_set=no"],
            "eval.stop_set=no must be one of eval.sets",
            "Set eval.stop_set",
        ),
        (
            ["eval.stop_patience=3", "eval_interval=0"],
            "of which there are none while training",
            "Set eval_interval=100",
        ),
        (
            ["schedule.timescale=1"],
            "schedule.timescale=1 is for inverse_sqrt",
            "Set schedule.name=inverse_sqrt",
        ),
        (
            ["schedule.pieces=[{}]"],
            "is for pieces, not for schedule.name=cosine",
            "Set schedule.name=pieces",
        ),
        (
            ["schedule.name=constant", "schedule.min_learning_rate=2e-4"],
            "schedule.min_learning_rate=0.0002 is for linear, cosine, exponential, inverse_sqrt, polynomial or wsd, not for",
            "or leave it out (schedule.min_learning_rate=null).",
        ),
        (
            [*pieces("{}"), "schedule.min_learning_rate=1"],
            "schedule.min_learning_rate=1.0 is for linear",
            "Set schedule.name=linear, cosine",
        ),
        (
            ["schedule.name=pieces"],
            "schedule.pieces is empty",
            "Set for example 'schedule.pieces=[{name: constant, until: 0.8",
        ),
        (
            pieces("{until: 40}"),
            "schedule.pieces[0].until=40.0 would end the last piece",
            "Add a piece after it",
        ),
        (
            pieces("{}, {}"),
            "schedule.pieces[0].until is null, but a piece follows",
            "Set schedule.pieces[0].until=STEPS",
        ),
        (
            pieces("{until: 30}, {}"),
            "must end after warm-up (schedule.warmup_steps=30), which ends at 30",
            "Set the ends",
        ),
        (
            pieces("{until: 90}, {until: 0.3, unit: fraction}, {}"),
            "must end after schedule.pieces[0], which ends at 90",
            "Set the",
        ),
        (
            pieces("{until: 300}, {}"),
            "schedule.pieces[0].until=300.0 ends at step 300",
            "Set the ends of the pieces",
        ),
        (
            pieces("{power: 3}"),
            "schedule.pieces[0].power=3.0 is for polynomial, not for schedule.pieces[0].name=linear",
            "Set sch",
        ),
        (
            pieces("{name: constant, end: 0.1}"),
            "schedule.pieces[0].end=0.1 is not for a constant",
            "pieces[0].name=linear",
        ),
        # batch
        (
            ["optimizer.accumulation=3"],
            "data.batch_size=16 must be divisible by optimizer.accumulation=3",
            "15 or 18",
        ),
        (
            ["optimizer.accumulation=3"],
            "data.batch_size=16",
            "optimizer.accumulation to 1, 2, 4 or 8",
        ),
        (
            ["mesh.data=3", "mesh.fsdp=1"],
            "data.batch_size=16 must be divisible by mesh.data=3 times mesh.fsdp=1",
            "15 or 18",
        ),
        (
            ["mesh.fsdp=8", "optimizer.accumulation=4"],
            "times optimizer.accumulation=4",
            "Set data.batch_size to 32",
        ),
        (
            ["mesh.fsdp=8", "eval.batch_size=12"],
            "eval.batch_size=12 must be divisible",
            "Set eval.batch_size to 8 or 16",
        ),
        # mesh
        (["mesh.data=0"], "mesh.data=0 must be at least 1", "Set mesh.data to 1 or -1"),
        (["mesh.tensor=-2"], "mesh.tensor=-2", "Set mesh.tensor to 1 or -1"),
        (
            ["mesh.data=-1"],
            "mesh.data=-1 and mesh.fsdp=-1: only one",
            "Set mesh.data or mesh.fsdp to 1",
        ),
        (
            ["mesh.tensor=3"],
            "mesh.tensor=3 must divide model.num_heads=4 and model.num_kv_heads=2",
            "Set mesh.tensor to 1 or 2",
        ),
        (
            ["mesh.tensor=2", "model.vocab_size=4097"],
            "mesh.tensor=2 must divide model.vocab_size=4097",
            "mesh.tensor to 1",
        ),
        (
            ["mesh.tensor=2", "model.mlp_dim=705"],
            "mesh.tensor=2 must divide model.mlp_dim=705",
            "mesh.tensor to 1",
        ),
        (
            ["mesh.simulated_devices=8", "mesh.platform=gpu"],
            "mesh.platform=gpu",
            "Set mesh.platform=cpu",
        ),
        (
            ["mesh.num_processes=2", "mesh.min_processes=3"],
            "mesh.min_processes=3 is more than",
            "to at most 2",
        ),
        (
            ["mesh.num_processes=2", "mesh.process_id=2"],
            "mesh.process_id=2 must be less than",
            "at most 1",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_one_problem_with_value_and_mend(overrides, value, mend):
    (problem,) = problems(*overrides)
    assert value in problem
    assert re.search(r"\. (Set|Add|Give) ", problem), "no mend"
    assert mend in problem.partition(". ")[2] or mend in problem


def test_all_are_reported_at_once():
    found = problems(
        "schedule.warmup_steps=500", "eval.sets={}", "schedule.min_learning_rate=1", "optimizer.beta2=1", "mesh.data=0",
        "output_dir=data/stdlib/train", "model.num_kv_heads=3", "run_name=a/b", "optimizer.accumulation=3",
    )  # fmt: skip
    assert len(found) == 9


def test_a_value_already_refused_is_not_judged_against_others():
    (problem,) = problems("steps=ten", "schedule.warmup_steps=400")
    assert problem.startswith("steps=ten")
    assert len(problems("steps=ten", "schedule.warmup_steps=400", "mesh.data=0")) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps=auto", "schedule.warmup_steps=100000"],
        ["eval.sets={}", "eval_interval=0"],
        ["eval_steps=0", "eval_interval=0"],
        ["model.head_dim=66"],
        ["model.embed_dim=250", "model.head_dim=64"],
        ["mesh.tensor=2", "mesh.data=4", "mesh.fsdp=2", "optimizer.accumulation=2"],
        ["mesh.simulated_devices=8", "mesh.platform=cpu"],
        ["output_dir=data/stdlib"],
        [
            "data.sources.stdlib.path=s3://quickstart",
            "output_dir=s3:",
        ],  # a URL is no folder of this machine
        ["eval.sets.a.path=data/stdlib/train"],
        ["optimizer.beta1=0", "schedule.min_learning_rate=2e-3"],
        pieces(
            "{name: constant, until: 0.5, unit: fraction}, {name: inverse_sqrt, until: 200}, {end: 0.1}"
        ),
        [
            "optimizer.name=lion",
            "optimizer.beta2=0.99",
            "optimizer.groups.slow.pattern=embed",
            "optimizer.groups.slow.lr_factor=0.1",
        ],
        ["optimizer.zero=3", "mesh.data=-1", "mesh.fsdp=1"],
        [
            "anomaly.weight_drift=warn",
            "anomaly.drift_limit=0.2",
            "anomaly.grad_spike=off",
            "anomaly.patience=3",
        ],
        ["anomaly.dead=rollback", "anomaly.leave_out=3", "anomaly.max_rollbacks=9"],
        ["data.repeated=rollback", "anomaly.leave_out=3", "anomaly.max_rollbacks=9"],
        ["data.repeated=skip", "anomaly.max_rollbacks=9"],
        [
            "model.rope_scaling=llama3",
            "model.rope_factor=4",
            "data.packing=pad",
            "data.on_long=skip",
        ],
        [
            "data.corruption.rate=0.1",
            "data.corruption.token_id=3",
            "data.min_fill=0.1",
            "data.fill_patience=3",
        ],
        ["schedule.name=constant", "optimizer.learning_rate=1e-5"],
        [
            "loss_scale.mode=static",
            "loss_scale.initial=1024",
            "loss.adversarial=1",
            "loss.adversarial_radius=2",
        ],
        [
            "precision.params=bfloat16",
            "optimizer.beta2=0.99",
            "checkpoint.init_from=hf",
            "init.mup_base_width=64",
        ],
        ["optimizer.normalize=sequences", "data.attend_across_documents=true", "data.packing=pad"],
        ["schedule.name=inverse_sqrt", "schedule.timescale=10"],
        [
            "regularization.attention_dropout=0.1",
            "model.attention=eager",
            "regularization.embedding_noise=5",
        ],
        [
            "init.name=truncated_normal",
            "init.std=0.02",
            "init.mup_base_width=64",
            "init.mup_base_depth=2",
        ],
        ["objective=distill", "distill.teacher=runs/wide", "distill.weight=1", "loss.z_loss=0.1"],
        ["mesh.coordinator=[::1]:1234", "mesh.num_processes=2", "mesh.process_id=1"],
    ],
    ids=" ".join,
)
def test_what_is_fine_is_accepted(overrides):
    assert load(*overrides).run_name == "quickstart"


@pytest.mark.parametrize(
    ("overrides", "devices", "rule", "mend"),
    [
        (["mesh.fsdp=3"], 8, "= 3 must be the number of devices, 8", "Set mesh.fsdp to 8"),
        (
            ["mesh.data=2", "mesh.fsdp=2"],
            8,
            "mesh.data=2 x mesh.fsdp=2 x mesh.tensor=1 = 4 must be",
            "mesh.data to 4, or",
        ),
        (
            ["mesh.data=3"],
            8,
            "mesh.data=3 x mesh.tensor=1 = 3 must divide the number of devices, 8",
            "to 1, 2, 4 or 8",
        ),
        (
            ["mesh.data=16"],
            8,
            "= 16 must divide the number of devices, 8",
            "mesh.data to 1, 2, 4 or 8",
        ),
        (
            ["mesh.data=4", "mesh.fsdp=4"],
            6,
            "= 16 must be the number of devices, 6",
            "multiply to 6, or mesh.fsdp=-1",
        ),
        (
            ["data.batch_size=16"],
            3,
            "data.batch_size=16 must be divisible by mesh.data=1 times mesh.fsdp=3",
            "to 15 or 18",
        ),
        (
            ["mesh.fsdp=1", "mesh.tensor=-1"],
            4,
            "mesh.tensor=4 must divide model.num_kv_heads=2",
            "mesh.tensor to 1 or 2",
        ),
    ],
)
def test_devices_that_do_not_fit(overrides, devices, rule, mend):
    given_batch = any(o.startswith("data.batch_size") for o in overrides)
    config = load_config(
        ["config=quickstart", *overrides, *([] if given_batch else ["data.batch_size=48"])]
    )
    with pytest.raises(ConfigError) as caught:
        fit_to_devices(config, devices)
    assert rule in str(caught.value) and mend in str(caught.value)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    free=st.sampled_from([None, "data", "fsdp", "tensor"]),
)
def test_the_free_axis_takes_what_is_left(sizes, free):
    config = load_config(["config=quickstart"])
    axes = dict(zip(("data", "fsdp", "tensor"), sizes))
    devices = sizes[0] * sizes[1] * sizes[2]
    model = dataclasses.replace(config.model, num_heads=12, num_kv_heads=12, mlp_dim=12)
    data = dataclasses.replace(config.data, batch_size=144)
    given_axes = axes | ({free: -1} if free else {})
    config = dataclasses.replace(
        config, model=model, data=data, mesh=dataclasses.replace(config.mesh, **given_axes)
    )
    mesh = fit_to_devices(config, devices).mesh
    assert {name: getattr(mesh, name) for name in axes} == axes


@pytest.mark.parametrize("kernel", ["eager", "xla"])
def test_kernels_that_repeat_are_allowed_with_full_determinism(kernel):
    assert load("determinism=full", f"model.attention={kernel}").model.attention == kernel
    assert load("model.attention=cudnn", "data.packing=pad").determinism == "seeded"


@pytest.mark.parametrize(
    ("overrides", "had", "count", "devices", "accumulation"),
    [
        ((), 4, 2, 1, 2),
        ((), 4, 3, 1, 2),  # a device gets 8 rows instead of 12
        (("optimizer.accumulation=2",), 4, 1, 1, 8),
        (("optimizer.accumulation=3",), 8, 3, 8, None),  # 24 devices would need 72 rows at least
        (("mesh.fsdp=8",), 4, 2, 2, None),
    ],
)
def test_fewer_processes_accumulate_so_that_no_device_gets_more_rows_at_a_time(
    overrides, had, count, devices, accumulation
):
    config = load_config(["config=quickstart", "data.batch_size=48", *overrides])
    fewer = fit_to_fewer(config, had, count, devices)
    assert (fewer and fewer.optimizer.accumulation) == accumulation
    if fewer:
        rows = config.data.batch_size / config.optimizer.accumulation / (had * devices)
        assert config.data.batch_size / fewer.optimizer.accumulation / (count * devices) <= rows
        assert dataclasses.replace(fewer, optimizer=config.optimizer) == config
