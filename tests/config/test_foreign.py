"""Names of other stacks: each leads to a key that exists here."""

import shlex

import pytest

from data_pipeline.base.errors import ConfigError, UsageError
from maxtrain.config import keys, load_config
from maxtrain.config.foreign import FOREIGN, FOREIGN_VALUES


@pytest.mark.parametrize("name", FOREIGN)
def test_every_name_leads_to_a_key_that_exists(name):
    owner, ours, note = FOREIGN[name]
    assert ours in ("", "config") or ours in {k.path for k in keys.all_keys()}
    assert note and not note.endswith(".")
    assert keys.find(name) is None, "ours has the same name"
    start = (
        f"{name} is a key of {owner.partition(' and ')[0]}" if owner else f"{name} is not a key: "
    )
    assert keys.unknown(name).startswith(start) and note in keys.unknown(name)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("per_device_batch_size", "data.batch_size"),
        ("ici_fsdp_parallelism", "mesh.fsdp"),
        ("ici_tensor_parallelism", "mesh.tensor"),
        ("base_emb_dim", "model.embed_dim"),
        ("max_target_length", "data.seq_length"),
        ("gradient_accumulation_steps", "optimizer.accumulation"),
        ("adam_b1", "optimizer.beta1"),
        ("weight_dtype", "precision.params"),
        ("remat_policy", "model.remat"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("num_train_epochs", "data.sources.NAME.epochs"),
        ("max_grad_norm", "optimizer.clip_norm"),
        ("trainer.max_grad_norm", "optimizer.clip_norm"),
        ("per_device_train_batch_size", "data.batch_size"),
        ("attn_implementation", "model.attention"),
        ("save_steps", "checkpoint_interval"),
        *(
            ("n_layer", "model.num_layers"),
            ("n_head", "model.num_heads"),
            ("n_embd", "model.embed_dim"),
        ),
        *(
            ("batch_size", "data.batch_size"),
            ("block_size", "data.seq_length"),
            ("max_iters", "steps"),
        ),
        *(
            ("lr_decay_iters", "steps"),
            ("eval_iters", "eval_steps"),
            ("weight_decay", "optimizer.weight_decay"),
        ),
        *(("dropout", "regularization.residual_dropout"), ("min_lr", "schedule.min_lr_ratio")),
        *(
            ("warmup_iters", "schedule.warmup_steps"),
            ("grad_clip", "optimizer.clip_norm"),
            ("out_dir", "output_dir"),
        ),
        *(
            ("device", "mesh.platform"),
            ("dtype", "precision.compute"),
            ("compile", "every step is compiled"),
        ),
        ("training.global_batch_size", "data.batch_size"),
        ("trainer.num_train_steps", "steps"),
        ("head_dim", "model.head_dim"),  # the same name, one level down
        ("vocab_size", "model.vocab_size"),
        ("learning_rate", "optimizer.learning_rate"),
        ("ici_context_parallelism", "mesh.context"),
        ("dcn_fsdp_parallelism", "mesh.dcn_fsdp"),
        ("dcn_pipeline_parallelism", "mesh.dcn_stage"),
        ("parallelism.expert_parallel_degree", "mesh.expert"),
        ("mesh.ep", "mesh.expert"),
        ("parallelism.context_parallel_degree", "mesh.context"),
        ("mesh.dcn_expert", "mesh.dcn_data, mesh.dcn_stage or mesh.dcn_fsdp"),
        ("dcn_tensor", "mesh.tensor to the parts within one slice"),
        ("data.max_tokens", "optimizer.accumulation=auto"),
    ],
)
def test_the_usual_ones(theirs, ours):
    assert ours in keys.unknown(theirs)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in FOREIGN_VALUES.items() for value in values]
)
def test_values_that_others_have_are_told_as_settings(key, value):
    """The suggested settings are accepted."""
    given = ["config=quickstart", "mesh.stage=2", "mesh.fsdp=1"]
    with pytest.raises(ConfigError) as caught:
        load_config([*given, f"{key}={value}"])
    (problem,) = caught.value.problems
    settings = problem.partition(" Set ")[2].removesuffix(".").partition(" (")[0]
    assert settings == FOREIGN_VALUES[key][value].settings
    load_config([*given, *shlex.split(settings)])


@pytest.mark.parametrize(
    ("word", "settings"),
    [
        ("model.remat=attention_saved", "model.remat=named model.kept.on_device='[attention]'."),
        (
            "remat=offload_dots",
            "model.remat=named model.kept.on_device='[]' model.kept.on_host='[product]'.",
        ),
        ("remat_policy=minimal", "model.remat=dots_no_batch."),
        (
            "model.remat=[qkv, gate_up]",
            "model.remat=named model.kept.on_device='[qkv, attention]' (or others of qkv, "
            "attention, gate_up and product).",
        ),
        (
            "model.remat=save_dot_with_context_except_mlp",
            "model.remat=named model.kept.on_device='[qkv, attention]' (the product behind "
            "attention is computed again).",
        ),
        (
            "activation_checkpoint.mode=selective",
            "model.remat=named model.kept.on_device='[product, attention]' (every product is kept, "
            "there every second one).",
        ),
    ],
)
def test_what_to_keep_of_layers_is_told_key_by_key(word, settings):
    with pytest.raises(ConfigError) as caught:
        load_config(["config=quickstart", word])
    (problem,) = caught.value.problems
    assert problem.endswith(f" Set {settings}")


def test_a_list_of_what_to_keep_in_a_file_is_told_its_key(tmp_path):
    file = tmp_path / "listed.yaml"
    file.write_text("model: {remat: [qkv]}\n")
    with pytest.raises(ConfigError, match=r"model.remat=\['qkv'\] must be.*model.kept.on_device="):
        load_config([f"config={file}"])


def test_a_value_that_nobody_has_is_answered_with_those_that_are():
    with pytest.raises(ConfigError, match=r"model.remat=dits must be: .* Did you mean model.remat"):
        load_config(["config=quickstart", "model.remat=dits"])
    assert "named with model.kept.on_device" in keys.unknown("gradient_checkpointing")


def test_names_that_are_ours_too_need_no_entry():
    assert all(keys.find(name) for name in ("steps", "eval_interval", "eval_steps", "run_name"))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("mesh.pp", "mesh.stage splits layers over devices"),
        ("mesh.cp", "mesh.context splits rows over devices"),
        ("ici_pipeline_parallelism", "mesh.stage"),
    ],
)
def test_what_is_not_there_yet_is_said_and_nothing_guessed(name, missing):
    assert missing in keys.unknown(name) and "Did you mean" not in keys.unknown(name)


def test_a_name_of_several_stacks_is_said_to_be_theirs():
    assert keys.unknown("learning_rate").startswith(
        "learning_rate is a key of MaxText, Hugging Face and nanoGPT. Here it is"
    )


def test_the_command_line_answers_with_it_too():
    with pytest.raises(
        ConfigError,
        match=r"lr is a key of Hugging Face. Here it is optimizer.learning_rate: the peak",
    ):
        load_config(["config=quickstart", "lr=1e-3"])


def test_a_config_may_be_named_without_saying_that_it_is_one(tmp_path):
    assert load_config(["quickstart", "steps=50"]) == load_config(["config=quickstart", "steps=50"])
    (tmp_path / "own.yaml").write_text("data: {sources: {a: {path: b}}}")
    assert load_config([f"{tmp_path}/own.yaml"]) == load_config([f"config={tmp_path}/own.yaml"])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["quikstart"], "'quikstart' can't be understood.* Did you mean config=quickstart"),
        (
            ["quickstart", "llama3_1b"],
            "'llama3_1b' can't be understood.* config=quickstart is given already",
        ),
        (
            ["config=quickstart", "llama3_1b"],
            "'llama3_1b' can't be understood.* config=quickstart is given already",
        ),
        (["config=quickstart", "steps"], "Write steps=value, without dashes"),
    ],
)
def test_words_that_name_no_config_get_the_right_command(words, answer):
    with pytest.raises(UsageError, match=answer):
        load_config(words)
