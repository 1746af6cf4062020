"""Mixtral 8x7B, pretraining from random weights: 46.7 B parameters, of which 12.9 B are active per
token.

Data: any shards with the Mixtral tokenizer, here data/fineweb/train; one pass over them.
Reaches: not run. The shapes are those of the published weights, so checkpoint.init_from can load
  them.
Costs: computed, not measured: about 8e10 FLOP a token, so 1 B tokens are about 56 H100 hours at
  40 % of the peak; parameters and optimizer state take 560 GB in float32, split over mesh.expert
  and mesh.fsdp.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "mixtral_8x7b"
    config.eval_interval = 1000

    config.model.family = "mixtral"
    config.model.vocab_size = 32_000
    config.model.num_layers = 32
    config.model.embed_dim = 4096
    config.model.mlp_dim = 14_336
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.max_length = 32_768
    config.model.rope_theta = 1_000_000.0
    config.model.moe.num_experts = 8
    config.model.moe.experts_per_token = 2
    config.model.remat = "full"
    config.mesh.preset = "moe"

    config.data.sources.fineweb = {"path": "data/fineweb/train"}
    config.data.seq_length = 4096
    config.data.batch_size = 256  # 1 M tokens
    config.data.workers = 4
    config.eval.sets.fineweb = {"path": "data/fineweb/eval"}

    config.optimizer.learning_rate = 3e-4
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 2000
    return config
