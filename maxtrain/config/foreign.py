"""Keys of other training stacks: the key that each of them is here ("" if there is none), a note on
what else differs, and their usual values of keys that have other values here.

A name is looked up as it was typed, with its section, and then by its last part. If several stacks
have a name, the note of the first one is shown.
"""

from typing import Any, NamedTuple

_SHARDS = "a directory of token shards, made by `prepare`"
_MESH = "one mesh over all hosts: multiply the dcn and the ici value"
_SCALE = "no global scale is applied"
_SAME = "it means the same"
_TOKENIZER = "the tokenizer belongs to the data: give it to `prepare`, and the shards remember it"
_WHOLE = "rows of a whole step, over all devices: times the devices and the accumulation steps"
_STAGES = "micro-batches are in model.pipeline"
_SPLIT_ROWS = "a ring, or with model.attention=xla heads that are dealt out"
_ONE_TENSOR = "there is one way to split inside layers: mesh.tensor"
_HEADS = "model.num_kv_heads is a key of its own"
_REMAT = "full, dots, dots_no_batch, none, or named with model.kept.on_device and on_host"
_BETWEEN_SLICES = (
    "each layer waits for activations from the other parts, so they stay within a slice. Set "
    "mesh.context, mesh.expert and mesh.tensor to the parts within one slice, and mesh.dcn_data, "
    "mesh.dcn_stage or mesh.dcn_fsdp to the number of slices"
)
_SAME_ROWS = (
    "a step has data.batch_size rows on any devices. Set optimizer.accumulation=auto, and as many "
    "at a time are computed as fit"
)

# Key here, what differs, names there.
_MAXTEXT = (
    ("output_dir", "run directories are made in it", "base_output_directory"),
    (
        "seed",
        "data.seed is of the order of data alone, which is always shuffled",
        "data_shuffle_seed",
    ),
    ("init.seed", "null: seed", "init_weights_seed"),
    ("steps", "the schedule always ends with the plan", "learning_rate_schedule_steps"),
    (
        "checkpoint_interval",
        "steps; 0 writes the final checkpoint only",
        "checkpoint_period enable_checkpointing",
    ),
    ("optimizer.learning_rate", "the peak", "learning_rate"),
    (
        "optimizer.accumulation",
        "it splits data.batch_size, which is the whole step's",
        "gradient_accumulation_steps",
    ),
    ("data.sources.NAME.path", _SHARDS, "dataset_name"),
    ("schedule.name", "cosine or wsd, among others", "lr_schedule_type"),
    (
        "precision.compute",
        "inputs of matrix products; precision.params are the master weights",
        "dtype",
    ),
    ("log_interval", _SAME, "log_period"),
    ("model.moe.num_experts", "of a family that has experts", "num_experts model.num_experts"),
    ("model.moe.experts_per_token", _SAME, "num_experts_per_tok"),
    (
        "config",
        "take a shipped one, such as config=llama3_8b, or write your own file",
        "model_name",
    ),
    (
        "data.batch_size",
        "rows of a whole step: times the devices and the accumulation steps",
        "per_device_batch_size",
    ),
    (
        "data.seq_length",
        "tokens in a row; model.max_length is the most the model is meant for",
        "max_target_length",
    ),
    ("data.sources.NAME.path", _SHARDS, "dataset_path dataset_type hf_path grain_train_files"),
    ("data.sources.NAME.epochs", "set for each source, may be fractional", "num_epoch"),
    ("eval.sets.NAME.path", _SHARDS, "eval_dataset_name hf_eval_files grain_eval_files"),
    ("", _TOKENIZER, "tokenizer_path"),
    ("model.family", "the name of a family", "decoder_block"),
    ("model.embed_dim", _SCALE, "base_emb_dim"),
    ("model.mlp_dim", _SCALE, "base_mlp_dim"),
    ("model.num_heads", _SCALE, "base_num_query_heads"),
    ("model.num_kv_heads", _SCALE, "base_num_kv_heads"),
    ("model.num_layers", _SCALE, "base_num_decoder_layers"),
    ("model.tie_embeddings", _SAME, "logits_via_embedding"),
    ("model.norm_eps", _SAME, "normalization_layer_epsilon"),
    ("model.rope_theta", _SAME, "rope_max_timescale"),
    (
        "model.remat",
        _REMAT,
        "remat_policy",
    ),
    ("checkpoint.init_from", "a Hugging Face directory", "load_parameters_path"),
    ("optimizer.beta1", _SAME, "adam_b1"),
    ("optimizer.beta2", _SAME, "adam_b2"),
    ("optimizer.weight_decay", "of matrices only", "adam_weight_decay"),
    ("optimizer.clip_norm", "null, not 0, turns clipping off", "gradient_clipping_threshold"),
    ("schedule.warmup_steps", "steps, not a fraction", "warmup_steps_fraction"),
    ("schedule.min_lr_ratio", "a factor of the peak, too", "learning_rate_final_fraction"),
    ("schedule.decay_fraction", "of the whole run", "wsd_decay_steps_fraction"),
    (
        "regularization.residual_dropout",
        "attention_dropout and embedding_dropout are keys of their own",
        "dropout_rate",
    ),
    ("precision.params", "master weights and optimizer state", "weight_dtype"),
    ("mesh.platform", "auto, cpu, gpu or tpu", "hardware"),
    ("mesh.data", _SAME, "ici_data_parallelism"),
    ("mesh.dcn_data", _SAME, "dcn_data_parallelism"),
    ("mesh.fsdp", _SAME, "ici_fsdp_parallelism"),
    ("mesh.dcn_fsdp", _SAME, "dcn_fsdp_parallelism"),
    ("mesh.tensor", _MESH, "ici_tensor_parallelism dcn_tensor_parallelism"),
    ("mesh.stage", _STAGES, "ici_pipeline_parallelism"),
    ("mesh.dcn_stage", _STAGES, "dcn_pipeline_parallelism"),
    (
        "model.pipeline.micro_batches",
        "of the rows of a device at a time",
        "num_pipeline_microbatches",
    ),
    ("model.pipeline.rounds", _SAME, "num_pipeline_repeats"),
    ("mesh.expert", _MESH, "ici_expert_parallelism dcn_expert_parallelism"),
    (
        "mesh.context",
        f"{_MESH}; {_SPLIT_ROWS}",
        "ici_context_parallelism dcn_context_parallelism ici_sequence_parallelism "
        "dcn_sequence_parallelism",
    ),
    (
        "",
        "generation does not split rows over devices",
        "ici_context_autoregressive_parallelism dcn_context_autoregressive_parallelism",
    ),
    ("", _ONE_TENSOR, "ici_tensor_transpose_parallelism dcn_tensor_transpose_parallelism"),
    (
        "mesh.tensor",
        "tokens are always split over it between products",
        "ici_tensor_sequence_parallelism",
    ),
    ("", _ONE_TENSOR, "dcn_tensor_sequence_parallelism"),
    (
        "",
        "only FSDP that splits all is there: mesh.fsdp",
        "ici_fsdp_transpose_parallelism dcn_fsdp_transpose_parallelism",
    ),
    (
        "",
        "generation has one device",
        "ici_autoregressive_parallelism dcn_autoregressive_parallelism",
    ),
    (
        "mesh.rules.embed",
        "mesh.rules has a key for each dim of parameters; that of activations is fixed",
        "logical_axis_rules",
    ),
    ("checkpoint.asynchronous", _SAME, "async_checkpointing"),
    (
        "checkpoint.local",
        "a directory of each host, for a run behind a URL",
        "local_checkpoint_directory enable_emergency_checkpoint",
    ),
    (
        "checkpoint_interval",
        "of all saves; with checkpoint.local each upload_every-th of them is uploaded",
        "local_checkpoint_period",
    ),
)
_HUGGING_FACE = (
    ("optimizer.learning_rate", "the peak", "learning_rate lr"),
    ("data.sources.NAME.epochs", "set for each source, may be fractional", "num_train_epochs"),
    ("steps", "auto: as many as the data gives", "max_steps"),
    ("data.batch_size", _WHOLE, "per_device_train_batch_size train_batch_size"),
    ("eval.batch_size", "rows over all devices", "per_device_eval_batch_size eval_batch_size"),
    (
        "optimizer.accumulation",
        "it splits data.batch_size, which is the whole step's",
        "gradient_accumulation_steps",
    ),
    ("optimizer.clip_norm", "null, not 0, turns clipping off", "max_grad_norm"),
    ("optimizer.beta1", _SAME, "adam_beta1"),
    ("optimizer.beta2", "0.95 unless set, not 0.999", "adam_beta2"),
    ("optimizer.eps", _SAME, "adam_epsilon"),
    ("optimizer.name", "adamw, lion, muon and others", "optim"),
    (
        "optimizer.normalize",
        "tokens, the default: over all micro-batches",
        "average_tokens_across_devices",
    ),
    ("loss.label_smoothing", _SAME, "label_smoothing_factor"),
    ("regularization.embedding_noise", "NEFTune's alpha", "neftune_noise_alpha"),
    ("schedule.name", "cosine, linear, constant, wsd and others", "lr_scheduler_type"),
    ("schedule.warmup_steps", "steps, not a fraction", "warmup_ratio"),
    (
        "schedule.warmup_steps",
        "without schedule.warmup_steps there are 100 steps of warm-up, not none",
        "warmup_steps",
    ),
    ("optimizer.weight_decay", "of matrices only; 0.1 unless set, not 0", "weight_decay"),
    (
        "model.attention",
        "auto; or xla, eager, cudnn on GPUs, flash on TPUs",
        "attn_implementation use_flash_attention_2",
    ),
    ("model.remat", _REMAT, "gradient_checkpointing"),
    (
        "model.max_length",
        "the longest it is meant for; data.seq_length is trained",
        "max_position_embeddings",
    ),
    (
        "data.seq_length",
        "tokens in a row; longer text is packed, not cut",
        "max_seq_length max_length",
    ),
    ("model.embed_dim", _SAME, "hidden_size"),
    ("model.mlp_dim", _SAME, "intermediate_size"),
    ("model.num_layers", _SAME, "num_hidden_layers"),
    ("model.num_heads", _HEADS, "num_attention_heads"),
    ("model.num_kv_heads", _SAME, "num_key_value_heads"),
    ("model.norm_eps", _SAME, "rms_norm_eps"),
    ("model.tie_embeddings", _SAME, "tie_word_embeddings"),
    ("checkpoint.init_from", "a directory on disk, not a name of the Hub", "model_name_or_path"),
    ("data.sources.NAME.path", _SHARDS, "dataset_name train_file"),
    ("eval.sets.NAME.path", _SHARDS, "validation_file"),
    ("", _TOKENIZER, "tokenizer_name"),
    (
        "checkpoint_interval",
        "steps, or 0.5 epochs; 0: only the final one",
        "save_steps save_strategy",
    ),
    ("checkpoint.keep", "newest checkpoints that are kept", "save_total_limit"),
    (
        "checkpoint.keep_best",
        "keeps that step; the run ends with its last one",
        "load_best_model_at_end",
    ),
    (
        "eval.stop_patience",
        "evaluations of eval.stop_set without a lower loss",
        "early_stopping_patience",
    ),
    ("log_interval", _SAME, "logging_steps"),
    (
        "eval_interval",
        "steps, or 0.5 epochs; eval_steps counts batches",
        "eval_strategy evaluation_strategy",
    ),
    ("precision.compute", "bfloat16 (the default), float16 or float32", "bf16 fp16 torch_dtype"),
    ("data.workers", "0: threads of the process", "dataloader_num_workers"),
    ("data.prefetch", "batches, whatever the number of workers", "dataloader_prefetch_factor"),
    ("observe.trackers", "a list of tensorboard, wandb and mlflow", "report_to"),
    (
        "output_dir",
        "run directories are made in it; the text is in RUN/metrics.jsonl and RUN/tensorboard",
        "logging_dir",
    ),
    ("", "the same command goes on with the newest checkpoint by itself", "resume_from_checkpoint"),
    (
        "",
        "a run folder that exists is gone on with; set run_name for a new one",
        "overwrite_output_dir",
    ),
    ("", "training is what `maxtrain train` does, and evaluation is eval.sets", "do_train do_eval"),
    ("determinism", "full: only programs that repeat bit for bit", "full_determinism"),
    ("data.seed", "null: seed", "data_seed"),
    ("mesh.fsdp", "-1: all devices", "fsdp_config"),
    ("optimizer.zero", "1, 2 or 3, over mesh.data", "deepspeed"),
)
_NANOGPT = (
    (
        "data.batch_size",
        "rows of a whole step, not of a micro-batch: times gradient_accumulation_steps",
        "batch_size",
    ),
    (
        "data.seq_length",
        "tokens in a row; model.max_length is the most the model is meant for",
        "block_size",
    ),
    ("model.num_layers", _SAME, "n_layer"),
    ("model.num_heads", _HEADS, "n_head"),
    ("model.embed_dim", "model.mlp_dim is a key of its own, not 4 times this", "n_embd"),
    ("steps", "auto: as many as the data gives", "max_iters"),
    ("optimizer.learning_rate", "the peak", "learning_rate"),
    (
        "optimizer.accumulation",
        "it splits data.batch_size, which is the whole step's",
        "gradient_accumulation_steps",
    ),
    ("steps", "the schedule always ends with the plan", "lr_decay_iters"),
    ("eval_steps", "-1, the default: the whole set, exactly once", "eval_iters"),
    ("optimizer.weight_decay", "of matrices only", "weight_decay"),
    ("optimizer.beta1", _SAME, "beta1"),
    ("optimizer.beta2", _SAME, "beta2"),
    (
        "regularization.residual_dropout",
        "attention_dropout and embedding_dropout are keys of their own; here none is the default",
        "dropout",
    ),
    (
        "schedule.min_lr_ratio",
        "a factor of the peak; schedule.min_learning_rate is the rate itself",
        "min_lr",
    ),
    ("schedule.name", "constant is a schedule without decay", "decay_lr"),
    ("schedule.warmup_steps", _SAME, "warmup_iters"),
    ("optimizer.clip_norm", "null, not 0, turns clipping off", "grad_clip"),
    ("output_dir", "run directories are made in it, each with its run_name", "out_dir"),
    ("mesh.platform", "auto, cpu, gpu or tpu", "device"),
    (
        "precision.compute",
        "bfloat16 (the default), float16 or float32; precision.params are the master weights",
        "dtype",
    ),
    ("", "every step is compiled", "compile"),
    ("", "linear layers have no biases", "bias"),
    ("data.sources.NAME.path", _SHARDS, "dataset"),
    (
        "checkpoint.init_from",
        "a run or a Hugging Face directory; a run that exists is gone on with by itself",
        "init_from",
    ),
    ("checkpoint_interval", "a checkpoint is always saved", "always_save_checkpoint"),
    ("", "`eval_steps=-1` and eval.sets evaluate; a run without steps is not there", "eval_only"),
    ("observe.trackers", "add wandb to the list", "wandb_log"),
    ("observe.tracking.project", "with wandb in observe.trackers", "wandb_project"),
    ("observe.tracking.name", "with wandb in observe.trackers", "wandb_run_name"),
    (
        "mesh.coordinator",
        "processes find each other by the section mesh; there is no backend to choose",
        "backend",
    ),
)
_TORCHTITAN = (
    ("optimizer.learning_rate", "the peak", "optimizer.lr"),
    ("steps", "auto: as many as the data gives", "training.steps"),
    (
        "data.batch_size",
        "rows of a whole step, over all devices",
        "training.global_batch_size global_batch_size",
    ),
    ("data.batch_size", _WHOLE, "training.local_batch_size local_batch_size"),
    (
        "data.seq_length",
        "model.max_length is the most the model is meant for",
        "training.seq_len seq_len",
    ),
    ("optimizer.clip_norm", _SAME, "training.max_norm max_norm"),
    ("schedule.name", "cosine, linear, wsd and others", "lr_scheduler.decay_type decay_type"),
    ("schedule.warmup_steps", _SAME, "lr_scheduler.warmup_steps"),
    (
        "schedule.decay_fraction",
        "of the whole run, for schedule.name=wsd",
        "lr_scheduler.decay_ratio decay_ratio",
    ),
    ("schedule.min_lr_ratio", _SAME, "lr_scheduler.min_lr_factor min_lr_factor"),
    (
        "precision.compute",
        "inputs of matrix products",
        "training.mixed_precision_param mixed_precision_param",
    ),
    (
        "precision.accumulate",
        "sums of micro-batches' gradients",
        "training.mixed_precision_reduce mixed_precision_reduce",
    ),
    (
        "mesh.data",
        "replicas with own rows",
        "parallelism.data_parallel_replicate_degree data_parallel_replicate_degree",
    ),
    (
        "mesh.fsdp",
        "-1: what is left",
        "parallelism.data_parallel_shard_degree data_parallel_shard_degree",
    ),
    ("mesh.tensor", _SAME, "parallelism.tensor_parallel_degree tensor_parallel_degree"),
    ("mesh.stage", _STAGES, "parallelism.pipeline_parallel_degree pipeline_parallel_degree"),
    (
        "model.pipeline.schedule",
        "gpipe or 1f1b; with several blocks of layers in a stage, model.pipeline.rounds and gpipe",
        "parallelism.pipeline_parallel_schedule pipeline_parallel_schedule",
    ),
    (
        "model.pipeline.micro_batches",
        "how many there are, not the rows of one",
        "parallelism.pipeline_parallel_microbatch_size pipeline_parallel_microbatch_size",
    ),
    (
        "mesh.context",
        _SPLIT_ROWS,
        "parallelism.context_parallel_degree context_parallel_degree",
    ),
    (
        "mesh.expert",
        "an axis of its own: mesh.fsdp is what is left",
        "parallelism.expert_parallel_degree expert_parallel_degree",
    ),
    ("model.remat", _REMAT, "activation_checkpoint.mode"),
    (
        "config",
        "take a shipped one, such as config=llama3_8b, or write your own file",
        "model.flavor flavor",
    ),
    ("checkpoint_interval", "steps, or 0.5 epochs", "checkpoint.interval"),
    (
        "checkpoint.keep",
        "newest checkpoints that are kept",
        "checkpoint.keep_latest_k keep_latest_k",
    ),
    ("log_interval", _SAME, "metrics.log_freq log_freq"),
    (
        "observe.trackers",
        "a list, which has tensorboard unless it is set",
        "metrics.enable_tensorboard enable_tensorboard",
    ),
    ("observe.trackers", "add wandb to the list", "metrics.enable_wandb enable_wandb"),
    ("output_dir", "run directories are made in it", "job.dump_folder dump_folder"),
)
_LEVANTER = (
    ("steps", "auto: as many as the data gives", "trainer.num_train_steps num_train_steps"),
    ("data.batch_size", "rows of a whole step, too", "trainer.train_batch_size"),
    (
        "optimizer.accumulation",
        "micro-batches in a step",
        "trainer.per_device_parallelism per_device_parallelism",
    ),
    ("eval_interval", "steps, or 0.5 epochs", "trainer.steps_per_eval steps_per_eval"),
    ("precision.compute", "precision.params are the master weights", "trainer.mp"),
    (
        "checkpoint.minutes",
        "checkpoint_interval is by steps",
        "trainer.checkpointer.save_interval save_interval",
    ),
    (
        "mesh.tensor",
        _SAME,
        "trainer.tensor_parallel_axes tensor_parallel_axes trainer.model_axis_size model_axis_size",
    ),
    (
        "checkpoint.init_from",
        "weights only",
        "trainer.initialize_from initialize_from initialize_from_hf",
    ),
    ("schedule.warmup_steps", "steps, not a fraction", "optimizer.warmup warmup"),
    ("schedule.min_lr_ratio", _SAME, "optimizer.min_lr_ratio"),
    ("schedule.name", "cosine, linear, wsd and others", "optimizer.lr_schedule lr_schedule"),
    ("optimizer.clip_norm", "of all gradients together", "optimizer.max_grad_norm"),
    ("optimizer.eps", _SAME, "optimizer.epsilon epsilon"),
    ("model.embed_dim", _SAME, "model.hidden_dim hidden_dim"),
    ("model.mlp_dim", _SAME, "model.intermediate_dim intermediate_dim"),
    ("data.seq_length", "model.max_length is the most the model is meant for", "train_seq_len"),
    ("model.remat", _REMAT, "model.gradient_checkpointing"),
)
_PEFT = (
    ("model.lora.rank", _SAME, "lora_r lora_rank model.lora.r"),
    ("model.lora.alpha", _SAME, "lora_alpha model.lora.lora_alpha"),
    (
        "model.lora.targets",
        r"regular expressions that are found in paths such as layers.0.attention.q",
        "target_modules lora_target_modules model.lora.target_modules",
    ),
    ("model.lora.scaling", "root is what use_rslora=True is there", "use_rslora"),
    ("model.lora.magnitudes", _SAME, "use_dora"),
    (
        "model.lora.base",
        "int8 or nf4",
        "load_in_8bit load_in_4bit bnb_4bit_quant_type model.lora.quant model.lora.quantization",
    ),
    ("model.lora.dropout", _SAME, "lora_dropout model.lora.lora_dropout"),
)
_OURS_SOME_DAY = (
    ("", "mesh.stage splits layers over devices", "mesh.stages mesh.pipeline mesh.pp"),
    ("", "mesh.expert splits experts over devices", "mesh.experts mesh.ep"),
    ("", "mesh.context splits rows over devices", "mesh.sequence mesh.cp mesh.sp"),
    ("", _BETWEEN_SLICES, "mesh.dcn_context mesh.dcn_expert mesh.dcn_tensor"),
    ("", _BETWEEN_SLICES, "dcn_context dcn_expert dcn_tensor mesh.dcn_sequence"),
    ("", _SAME_ROWS, "data.max_tokens max_tokens_per_batch"),
)


class ForeignKey(NamedTuple):
    """Facts about a name that is no key here: the stack that owns it ("" if none does, since it may
    become a key here), our key, and a note.
    """

    owner: str
    ours: str
    note: str

    def words(self, name: str) -> str:
        """The answer to somebody who typed this name."""
        if not self.owner:
            return f"{name} is not a key: {self.note}."
        *others, owners = self.owner.split(" and ")
        if others:
            owners = f"{', '.join(others)} and {owners}"
        if self.ours:
            return f"{name} is a key of {owners}. Here it is {self.ours}: {self.note}."
        return f"{name} is a key of {owners}. Here {self.note}."


_STACKS = {
    "": _OURS_SOME_DAY,
    "MaxText": _MAXTEXT,
    "Hugging Face": _HUGGING_FACE,
    "nanoGPT": _NANOGPT,
    "torchtitan": _TORCHTITAN,
    "Levanter": _LEVANTER,
    "PEFT": _PEFT,
}


def _table() -> dict[str, ForeignKey]:
    """Return every foreign name; a name that several stacks have for the same key belongs to all of
    them.
    """
    found: dict[str, ForeignKey] = {}
    for owner, rows in _STACKS.items():
        for ours, note, names in rows:
            for name in names.split():
                known = found.setdefault(name, ForeignKey(owner, ours, note))
                if known.ours == ours and owner not in known.owner:
                    found[name] = known._replace(owner=f"{known.owner} and {owner}")
    return found


FOREIGN = _table()


def _kept(on_device: str, on_host: str = "") -> str:
    """The settings that keep what these names are of."""
    words = f"model.remat=named model.kept.on_device='[{on_device}]'"
    if on_host:
        words += f" model.kept.on_host='[{on_host}]'"
    return words


class ForeignValue(NamedTuple):
    """The settings that a value of other stacks is, and what differs ("": nothing)."""

    settings: str
    note: str = ""

    def fix(self) -> str:
        """Return the advice on what to set instead."""
        note = ""
        if self.note:
            note = f" ({self.note})"
        return f"Set {self.settings}{note}."


_OUT = "the product behind attention is computed again"
# By the key here. Those of remat are MaxText's, torchtitan's selective, and two usual words.
FOREIGN_VALUES = {
    "model.remat": {
        "attention_saved": ForeignValue(_kept("attention")),
        "offload_dots": ForeignValue(_kept("", "product")),
        "minimal": ForeignValue("model.remat=dots_no_batch"),
        "minimal_offloaded": ForeignValue(_kept("", "product")),
        "minimal_with_context": ForeignValue(_kept("product, attention")),
        "minimal_flash": ForeignValue(_kept("product, attention")),
        "save_dot_with_context_except_mlp": ForeignValue(_kept("qkv, attention"), _OUT),
        "save_dot_except_mlp": ForeignValue(_kept("qkv"), _OUT),
        "save_dot_except_mlpwi": ForeignValue(
            _kept("qkv"), "the products behind attention and in mlp are computed again"
        ),
        "save_qkv_proj": ForeignValue(_kept("qkv")),
        "qkv_proj_offloaded": ForeignValue(_kept("", "qkv")),
        "save_out_proj": ForeignValue(
            _kept("attention"), f"what comes of the kernel is kept, and {_OUT}"
        ),
        "custom": ForeignValue(
            _kept("qkv, attention"), "or others of qkv, attention, gate_up and product"
        ),
        "selective": ForeignValue(
            _kept("product, attention"), "every product is kept, there every second one"
        ),
    },
    "model.pipeline.schedule": {
        "1F1B": ForeignValue("model.pipeline.schedule=1f1b"),
        "GPipe": ForeignValue("model.pipeline.schedule=gpipe"),
        "Interleaved1F1B": ForeignValue(
            "model.pipeline.rounds=2 model.pipeline.schedule=gpipe",
            "or 1f1b with one round, which keeps less and waits longer",
        ),
    },
}


def value_elsewhere(key: str, value: Any) -> ForeignValue | None:
    """Return what a value of other stacks is here; None if no stack has that value."""
    is_text = isinstance(value, str)
    is_list = isinstance(value, list) or (is_text and value.startswith("["))
    if key == "model.remat" and is_list and value not in ([], "[]"):
        return FOREIGN_VALUES[key]["custom"]
    if not is_text:
        return None
    return FOREIGN_VALUES.get(key, {}).get(value)
