"""Rules of the model, its initial weights and the mesh: each message has the value and the
advice."""

import pytest

from tests.config.checking import check_accepted, check_problem, problems

DEEPSEEK = [
    "model.family=deepseek_v3",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=24",
    "model.latent.rope_dim=8",
]
TOKAMAX = ["model.family=mixtral", "model.routing.kernel=tokamax"]
ONE_F_ONE_B = ["mesh.stage=2", "mesh.fsdp=1", "model.pipeline.schedule=1f1b"]
LONGROPE = [
    "model.rope_scaling=longrope",
    "model.head_dim=8",
    "model.rope.long_factors=[1, 2, 4, 8]",
]


@pytest.mark.parametrize(
    ("overrides", "value", "advice"),
    [
        (
            [
                "model.attention=cudnn",
                "data.packing=pad",
                "model.family=gemma2",
                "model.attention_softcap=50",
            ],
            "model.attention=cudnn can't bound scores, as model.attention_softcap=50.0 asks for",
            "model.attention=xla",
        ),
        (
            ["model.window=8"],
            "model.window=8 is for mistral, qwen2, qwen2_moe, qwen3, gemma2, gemma3, gpt_oss, mixtral ",
            "model.family",
        ),
        (
            ["model.family=gpt2", "model.num_kv_heads=4", "model.rope_theta=100"],
            "model.rope_theta=100.0 is not used with model.family=gpt2, whose positions are learned",
            "Set model.rope_theta=500000.0, or leave it out",
        ),
        (
            ["model.moe.num_experts=4"],
            "model.moe.num_experts=4 is for mixtral, qwen2_moe, qwen3_moe, deepseek_v2",
            "model.family",
        ),
        (
            ["model.family=mixtral", "model.moe.experts_per_token=9"],
            "must be at most model.moe.num_experts=8",
            "Set model.moe.experts_per_token=8",
        ),
        (
            ["model.family=qwen2_moe", "model.moe.expert_dim=24"],
            "model.moe.shared_dim=0 must be at least 1 with model.family=qwen2_moe",
            "Set model.moe.shared_dim=24",
        ),
        (
            ["model.family=qwen3_moe", "model.moe.shared_dim=9"],
            "model.moe.shared_dim=9 is for qwen2_moe, deepseek_v2 or deepseek_v3",
            "model.family",
        ),
        (
            [*DEEPSEEK, "model.moe.num_groups=3"],
            "model.moe.num_groups=3 must divide model.moe.num_experts=8",
            "Set model.moe.num_groups to 1, 2, 4 or 8",
        ),
        (
            [*DEEPSEEK, "model.moe.num_groups=4", "model.moe.top_groups=5"],
            "model.moe.top_groups=5 must be at most model.moe.num_groups=4",
            "Set model.moe.top_groups=4",
        ),
        (
            [*DEEPSEEK, "model.moe.num_groups=4", "model.moe.experts_per_token=3"],
            "must be at most 2, the experts in model.moe.top_groups=1 of 4 groups",
            "model.moe.top_groups to more",
        ),
        (
            [*DEEPSEEK, "model.num_kv_heads=1"],
            "must be model.num_heads=",
            "Set model.num_kv_heads=",
        ),
        (
            [*DEEPSEEK, "model.head_dim=8"],
            "model.head_dim=8 must be more than model.latent.rope_dim=8",
            "Set model.head_dim=24",
        ),
        (
            [*DEEPSEEK, "model.latent.rope_dim=5"],
            "model.latent.rope_dim=5 must be even",
            "Set model.latent.rope_dim=6",
        ),
        (
            [*DEEPSEEK, "model.attention=flash"],
            "model.attention=flash needs values of the size of keys",
            "Set model.attention=xla",
        ),
        (
            [*TOKAMAX, "model.embed_dim=64"],
            "matrices of 128 inputs and outputs at least, and model.embed_dim is 64",
            "Set model.routing.kernel=blocks",
        ),
        (
            [*TOKAMAX, "model.moe.expert_dim=64"],
            "a device has 64 units of an expert",
            "Set model.routing.kernel=blocks",
        ),
        (
            [*TOKAMAX, "model.lora.rank=4", "model.lora.base=nf4"],
            "no adapters beside quantised weights, as model.lora.base=nf4 asks for",
            "Set model.routing.kernel=blocks",
        ),
        (
            [*TOKAMAX, "model.routing.capacity_factor=1.5"],
            "is not used with model.routing.capacity_factor=1.5",
            "Set model.routing.kernel=blocks",
        ),
        (
            ["model.family=gpt_oss", "model.attention=flash"],
            "model.attention=flash has no attention sinks",
            "Set model.attention=xla",
        ),
        (
            [
                "model.family=mixtral",
                "model.routing.balance_scope=global",
                "optimizer.accumulation=2",
                "loss.adversarial=1",
            ],
            "choices before the attack where optimizer.accumulation=2 and loss.adversarial=1",
            "Set model.routing.balance_scope=sequence",
        ),
        (
            ["model.family=mixtral", "model.moe.expert_dim=7", "mesh.tensor=2"],
            "mesh.tensor=2 must divide model.moe.expert_dim=7",
            "mesh.tensor to",
        ),
        (
            ["model.family=mixtral", "regularization.router_noise_scale=2"],
            "regularization.router_noise_scale=2.0 is not used with",
            "Set regularization.router_noise=gaussian",
        ),
        (
            ["regularization.router_noise=gumbel"],
            "regularization.router_noise=gumbel is for mixtral",
            "model.family",
        ),
        (
            ["model.family=gpt2", "model.num_kv_heads=1"],
            "model.num_kv_heads=1 must be model.num_heads=",
            "model.num_kv_heads=",
        ),
        (
            ["model.family=gpt2", "model.num_kv_heads=4", "model.head_dim=6"],
            "must be model.embed_dim=",
            "Set model.head_dim=null",
        ),
        (
            ["model.attention=cudnn", "determinism=full", "data.packing=pad"],
            "model.attention=cudnn may add in another order each time",
            "Set model.attention to eager or xla, or determinism=seeded.",
        ),
        (
            ["model.attention=cudnn"],
            "data.packing=stream puts several into one",
            "Set data.packing=pad, data.attend_across_documents=true to allow that, or model.attention=xla.",
        ),
        (
            ["model.attention=cudnn", "data.packing=pad", "precision.compute=float32"],
            "does not support precision.compute=float32",
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
        # what is kept
        (
            ["model.remat=named", "model.kept.on_device=[scores]"],
            "model.kept.on_device: nothing in a layer is called 'scores'",
            "Set it to names among qkv, attention, gate_up or product.",
        ),
        (
            ["model.remat=named", "model.kept.on_host=[attention]"],
            "attention is named twice, and stored once",
            "Set model.kept.on_device or model.kept.on_host without it.",
        ),
        (
            ["model.remat=named", "model.kept.on_device=[product, qkv]"],
            "product has qkv among others",
            "Set both without qkv.",
        ),
        (
            ["model.remat=full", "model.kept.on_host=[product]"],
            "model.kept.on_host=[product] is not used with model.remat=full",
            "Set model.remat=named, or leave it out.",
        ),
        # stages
        (
            ["mesh.stage=3", "model.num_layers=24", "model.vocab_size=256"],
            "mesh.stage=3 must divide model.vocab_size=256",
            "Set mesh.stage to 1, 2, 4 or 8.",
        ),
        (
            ["mesh.stage=2", "mesh.fsdp=1", "model.pipeline.micro_batches=3"],
            "which model.pipeline.micro_batches=3 must divide",
            "Set model.pipeline.micro_batches to 1, 2, 4 or 8, or data.batch_size to 15 or 18.",
        ),
        (
            ["mesh.stage=32", "mesh.fsdp=1", "model.num_layers=64", "model.pipeline.rounds=2"],
            "needs at least mesh.stage=32 of them",
            "Set model.pipeline.rounds=1, or data.batch_size to 32 or more.",
        ),
        (
            ["model.pipeline.rounds=2"],
            "model.pipeline.rounds=2 is not used with mesh.stage=1",
            "Set mesh.stage=2, for example, or leave it out.",
        ),
        (
            ["model.pipeline.schedule=1f1b"],
            "model.pipeline.schedule=1f1b is not used with mesh.stage=1",
            "Set mesh.stage=2, for example, or leave it out.",
        ),
        (
            [*ONE_F_ONE_B, "model.pipeline.rounds=2"],
            "model.pipeline.schedule=1f1b takes rows through stages once, and "
            "model.pipeline.rounds=2 several times",
            "Set model.pipeline.rounds=1, or model.pipeline.schedule=gpipe.",
        ),
        (
            [*ONE_F_ONE_B, "loss.adversarial=1"],
            "loss.adversarial=1.0 passes rows several times",
            "Set loss.adversarial=0, without other keys of it, or model.pipeline.schedule=gpipe.",
        ),
        (
            [*ONE_F_ONE_B, "objective=distill", "distill.teacher=DIR"],
            "distill.teacher=DIR passes rows through a second model",
            "Set distill.teacher=null and distill.stored to what `maxtrain teach` keeps of it, or "
            "model.pipeline.schedule=gpipe.",
        ),
        (
            [*ONE_F_ONE_B, "objective=dpo", "dpo.loss_type=ipo", "data.packing=bins"],
            "dpo.loss_type=ipo passes rows through a reference, too",
            "Set dpo.reference_logprobs=stored, or model.pipeline.schedule=gpipe.",
        ),
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
        (
            ["model.rope_factor=4"],
            "model.rope_factor=4.0 is not used with model.rope_scaling=none",
            "model.rope_scaling=llama3",
        ),
        (
            ["model.rope_scaling=linear", "model.rope_original_length=16"],
            "model.rope_original_length=16 is not used with model.rope_scaling=linear",
            "Set model.rope_scaling=llama3, dynamic, yarn or longrope, or leave it out",
        ),
        (
            ["model.rope_scaling=llama3", "model.rope.beta_fast=16"],
            "model.rope.beta_fast=16.0 is not used with model.rope_scaling=llama3",
            "Set model.rope_scaling=yarn, or leave it out",
        ),
        (
            [
                "model.rope_scaling=yarn",
                "model.rope.attention_factor=1.5",
                "model.rope.mscale=2",
            ],
            "model.rope.mscale=2.0 is not used with model.rope.attention_factor=1.5",
            "Set model.rope.attention_factor=null, or leave it out",
        ),
        (
            ["model.rope_scaling=yarn", "model.rope.mscale=2"],
            "model.rope.mscale=2.0 and model.rope.mscale_all_dim=null count only together",
            "Set both, or leave both out",
        ),
        (
            ["model.rope_scaling=yarn", "model.rope.beta_slow=32"],
            "model.rope.beta_fast=32.0 must be more than model.rope.beta_slow=32.0",
            "Set model.rope.beta_fast=32 and model.rope.beta_slow=1",
        ),
        (
            ["model.rope_scaling=yarn", "model.rope_theta=1"],
            "model.rope_theta=1.0 must be more than 1 with model.rope_scaling=yarn",
            "Set model.rope_theta=10000",
        ),
        (
            [*LONGROPE, "model.rope.short_factors=[1, 2, 3]"],
            "model.rope.short_factors has 3 numbers, and must have one for each of the 4 pairs",
            "Set model.rope.short_factors to 4 numbers",
        ),
        (
            [*LONGROPE, "model.rope.short_factors=[1, 2, -3, 4]"],
            "model.rope.short_factors[2]=-3.0 must be at least 1e-06 and at most 1000000",
            "Set model.rope.short_factors to such numbers",
        ),
        (
            [*LONGROPE, "model.rope.short_factors=[1, 1, 1, 1]", "model.rope_original_length=1"],
            "model.rope_original_length=1 must be more than 1 with model.rope_scaling=longrope",
            "Set model.rope_original_length=4096",
        ),
        (
            ["mesh.context=3", "data.seq_length=512", "model.attention=ring"],
            "data.seq_length=512 must be divisible by 2 times mesh.context=3",
            "Set data.seq_length to 510 or 516",
        ),
        (
            ["mesh.context=2", "model.attention=ring", "regularization.residual_dropout=0.1"],
            "regularization.residual_dropout=0.1 goes by a token's place in the row",
            "Set regularization.residual_dropout=0, or model.attention=xla",
        ),
        (
            [
                "mesh.context=4",
                "model.num_heads=2",
                "model.num_kv_heads=2",
                "model.attention=xla",
            ],
            "model.num_heads=2 must be divisible by mesh.tensor=1 times mesh.context=4",
            "model.attention=ring",
        ),
        (
            ["model.attention=ring"],
            "model.attention=ring is for rows that are split over devices",
            "Set model.attention=xla, or mesh.context=2",
        ),
        (
            ["mesh.expert=2"],
            "mesh.expert=2 splits experts, and model.family=llama has none",
            "Set mesh.expert=1, and mesh.fsdp higher",
        ),
        (
            ["mesh.expert=3", "model.family=mixtral"],
            "mesh.expert=3 must divide model.moe.num_experts=8",
            "Set mesh.expert to 1, 2, 4 or 8",
        ),
        (
            ["mesh.expert=8", "mesh.fsdp=4", "model.family=mixtral"],
            "data.batch_size=16 must be divisible by mesh.data=1 times mesh.fsdp=4 times "
            "mesh.expert=8",
            "Set data.batch_size to 32",
        ),
        (
            ["mesh.expert=2", "mesh.stage=2", "model.family=mixtral", "model.vocab_size=512"],
            "mesh.stage=2 does not go with mesh.expert=2",
            "Set mesh.expert=1, and mesh.fsdp or mesh.tensor higher, or mesh.stage=1",
        ),
        (
            ["mesh.preset=moe"],
            "mesh.preset=moe splits experts, and model.family=llama has none",
            "Set mesh.preset=fsdp",
        ),
        (
            ["model.routing.exchange_factor=2", "model.family=mixtral"],
            "model.routing.exchange_factor=2.0 is for experts that are split over devices",
            "Set mesh.expert=2 or more",
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
def test_one_problem_with_value_and_mend(overrides, value, advice):
    check_problem(overrides, value, advice)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.head_dim=66"],
        ["model.embed_dim=250", "model.head_dim=64"],
        ["mesh.tensor=2", "mesh.data=4", "mesh.fsdp=2", "optimizer.accumulation=2"],
        ["mesh.simulated_devices=8", "mesh.platform=cpu"],
        [
            "model.rope_scaling=llama3",
            "model.rope_factor=4",
            "data.packing=pad",
            "data.on_long=skip",
        ],
        ["model.rope_scaling=linear", "model.rope_factor=2"],
        ["model.rope_scaling=dynamic", "model.rope_original_length=64"],
        ["model.rope_scaling=yarn", "model.rope.mscale=1", "model.rope.mscale_all_dim=0.5"],
        [*LONGROPE, "model.rope.short_factors=[1, 1.5, 2, 3]", "model.rope.attention_factor=1"],
        [
            "init.name=truncated_normal",
            "init.std=0.02",
            "init.mup_base_width=64",
            "init.mup_base_depth=2",
        ],
        ["mesh.coordinator=[::1]:1234", "mesh.num_processes=2", "mesh.process_id=1"],
    ],
    ids=" ".join,
)
def test_what_is_fine_is_accepted(overrides):
    check_accepted(overrides)


def test_factors_of_pairs_are_finite():
    (problem,) = problems(*LONGROPE, "model.rope.short_factors=[1, 2, .inf, 4]")
    assert (
        "model.rope.short_factors=[1, 2, inf, 4] must be: list of numbers (nan and inf" in problem
    )
    assert "Write for example model.rope.short_factors=" in problem


def test_completions_are_not_sampled_in_stages():
    found = problems("mesh.stage=2", "objective=grpo", "grpo.rewards=[exact]")
    (told,) = [problem for problem in found if "mesh.stage" in problem]
    assert told.startswith("mesh.stage=2 is not for completions that are sampled")
    assert told.endswith("Set mesh.stage=1, and mesh.fsdp or mesh.tensor higher.")
