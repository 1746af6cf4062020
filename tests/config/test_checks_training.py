"""Rules of loss, optimizer, schedule, precision, anomalies and integrity: each message has the
value and the advice."""

import pytest

from tests.config.checking import check_accepted, check_problem, pieces


@pytest.mark.parametrize(
    ("overrides", "value", "advice"),
    [
        (
            ["integrity.repeat_interval=100"],
            "integrity.repeat_interval=100 needs programs that repeat bit for bit",
            "Set determinism=full, or leave it out.",
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
        # loss
        (
            ["loss.adversarial_steps=3"],
            "loss.adversarial_steps=3 is not used with loss.adversarial=0",
            "Set loss.adversarial=1",
        ),
        (
            ["optimizer.normalize=sequences", "data.attend_across_documents=true"],
            "optimizer.normalize=sequences is a mean over documents, but data.attend_across_documents=true",
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
        (
            ["objective=distill", "distill.teacher=runs/wide", "distill.beta=0.3"],
            "distill.beta=0.3",
            "distill.kind=jsd",
        ),
        (
            ["objective=distill", "distill.teacher=a", "distill.kind=jsd", "distill.beta=1"],
            "distill.beta=1.0 leaves nothing of the student",
            "Set distill.beta=0.5",
        ),
        # regularization
        (
            ["regularization.residual_dropout=1"],
            "regularization.residual_dropout=1.0 must be less than 1",
            "=0.1",
        ),
        (
            ["model.attention=xla", "regularization.attention_dropout=0.1"],
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
            [
                "optimizer.on_host=true",
                "optimizer.stochastic_rounding=true",
                "precision.params=bfloat16",
            ],
            "optimizer.on_host=true updates layer by layer",
            "Set one of the two to false",
        ),
        (
            ["optimizer.on_host=true", "mesh.stage=2"],
            "mesh.stage=2 these hold different layers",
            "Set mesh.stage=1, or optimizer.on_host=false",
        ),
        (
            ["optimizer.on_host=true", "optimizer.name=muon"],
            "optimizer.on_host=true is for",
            "optimizer.name=adamw",
        ),
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
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_one_problem_with_value_and_mend(overrides, value, advice):
    check_problem(overrides, value, advice)


@pytest.mark.parametrize(
    "overrides",
    [
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
        ["objective=distill", "distill.teacher=runs/wide", "distill.weight=1", "loss.z_loss=0.1"],
    ],
    ids=" ".join,
)
def test_what_is_fine_is_accepted(overrides):
    check_accepted(overrides)
