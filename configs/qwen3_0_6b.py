"""Qwen3 0.6B, pretraining, or continued training of the published weights: 0.60 B parameters, norms
of queries and keys.

Data: any shards with the Qwen3 tokenizer, here data/fineweb/train; one pass over them.
Reaches: not run. The shapes are those of the published weights, so checkpoint.init_from can load
  them.
Costs: computed, not measured: about 5e9 FLOP a token, so 1 B tokens are about 3.5 H100 hours at
  40 % of the peak; parameters, gradients and optimizer state take 10 GB in float32, split over
  mesh.fsdp.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "qwen3_0_6b"
    config.eval_interval = 1000

    config.model.family = "qwen3"
    config.model.vocab_size = 151_936
    config.model.num_layers = 28
    config.model.embed_dim = 1024
    config.model.mlp_dim = 3072
    config.model.num_heads = 16
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.tie_embeddings = True
    config.model.max_length = 40_960
    config.model.norm_eps = 1e-6
    config.model.rope_theta = 1_000_000.0
    config.model.remat = "full"

    config.data.sources.fineweb = {"path": "data/fineweb/train"}
    config.data.seq_length = 4096
    config.data.batch_size = 128  # 0.5 M tokens
    config.data.workers = 4
    config.eval.sets.fineweb = {"path": "data/fineweb/eval"}

    config.optimizer.learning_rate = 3e-4
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 2000
    return config
