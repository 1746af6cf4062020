"""Rules of the model, its initial weights and the mesh: each message has the value and the mend."""

import pytest

from tests.config.checking import check_accepted, check_problem


@pytest.mark.parametrize(
    ("overrides", "value", "mend"),
    [
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
    check_problem(overrides, value, mend)


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
