"""The usual keys of MaxText: which key each is here ("" if there is none), and what else changes with it."""

_SHARDS = "a directory of token shards, made by `prepare`"
_MESH = "one mesh over all hosts: multiply the dcn and the ici value"
_SCALE = "no global scale is applied"
_SAME = "it means the same"
_ROWS = (
    ("output_dir", "run directories are made in it", "base_output_directory"),
    ("seed", "one seed for parameters and the order of data, which is always shuffled", "init_weights_seed data_shuffle_seed"),
    ("steps", "the schedule always ends with the plan", "learning_rate_schedule_steps"),
    ("checkpoint_interval", "steps; 0 writes the final checkpoint only", "checkpoint_period enable_checkpointing"),
    ("log_interval", _SAME, "log_period"),
    ("config", "take a shipped one, such as config=llama3_8b, or write your own file", "model_name"),
    ("data.batch_size", "rows of a whole step: times the devices and the accumulation steps", "per_device_batch_size"),
    ("data.seq_length", "tokens in a row; model.max_length is the most the model is meant for", "max_target_length"),
    ("data.sources.NAME.path", _SHARDS, "dataset_path dataset_name dataset_type hf_path grain_train_files"),
    ("data.sources.NAME.epochs", "set for each source, may be fractional", "num_epoch"),
    ("eval.sets.NAME.path", _SHARDS, "eval_dataset_name hf_eval_files grain_eval_files"),
    ("", "the tokenizer belongs to the data: give it to `prepare`, and the shards remember it", "tokenizer_path"),
    ("model.family", "llama or qwen3", "decoder_block"),
    ("model.embed_dim", _SCALE, "base_emb_dim"),
    ("model.mlp_dim", _SCALE, "base_mlp_dim"),
    ("model.num_heads", _SCALE, "base_num_query_heads"),
    ("model.num_kv_heads", _SCALE, "base_num_kv_heads"),
    ("model.num_layers", _SCALE, "base_num_decoder_layers"),
    ("model.tie_embeddings", _SAME, "logits_via_embedding"),
    ("model.norm_eps", _SAME, "normalization_layer_epsilon"),
    ("model.rope_theta", _SAME, "rope_max_timescale"),
    ("model.remat", "full recomputes most, dots is near MaxText's minimal, none recomputes nothing", "remat_policy"),
    ("checkpoint.init_from", "a Hugging Face directory", "load_parameters_path"),
    ("optimizer.beta1", _SAME, "adam_b1"),
    ("optimizer.beta2", _SAME, "adam_b2"),
    ("optimizer.weight_decay", "of matrices only", "adam_weight_decay"),
    ("optimizer.clip_norm", "null, not 0, turns clipping off", "gradient_clipping_threshold"),
    ("optimizer.accumulation", "it splits data.batch_size, which is the whole step's", "gradient_accumulation_steps"),
    ("schedule.name", "cosine or wsd, among others", "lr_schedule_type"),
    ("schedule.warmup_steps", "steps, not a fraction", "warmup_steps_fraction"),
    ("schedule.min_learning_rate", "the rate, not a fraction of the peak", "learning_rate_final_fraction"),
    ("schedule.decay_fraction", "of the whole run", "wsd_decay_steps_fraction"),
    ("regularization.residual_dropout", "attention_dropout and embedding_dropout are keys of their own", "dropout_rate"),
    ("precision.compute", "inputs of matrix products", "dtype"),
    ("precision.params", "master weights and optimizer state", "weight_dtype"),
    ("mesh.platform", "auto, cpu, gpu or tpu", "hardware"),
    ("mesh.data", _MESH, "ici_data_parallelism dcn_data_parallelism"),
    ("mesh.fsdp", _MESH, "ici_fsdp_parallelism dcn_fsdp_parallelism"),
    ("mesh.tensor", _MESH, "ici_tensor_parallelism dcn_tensor_parallelism"),
    ("checkpoint.asynchronous", _SAME, "async_checkpointing"),
)
MAXTEXT: dict[str, tuple[str, str]] = {name: (ours, note) for ours, note, names in _ROWS for name in names.split()}
