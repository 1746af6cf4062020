"""Qwen3 30B-A3B, pretraining from random weights: 30.5 B parameters, of which 3.3 B are active per
token.

Data: any shards with the Qwen tokenizer, here data/fineweb/train; one pass over them.
Reaches: not run. The shapes are those of the published weights, so checkpoint.init_from can load
  them.
Costs: computed, not measured: about 2.3e10 FLOP a token, so 1 B tokens are about 16 H100 hours at
  40 % of the peak; parameters and optimizer state take 366 GB in float32, split over mesh.expert
  and mesh.fsdp.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "qwen3_30b_a3b"
    config.eval_interval = 1000

    config.model.family = "qwen3_moe"
    config.model.vocab_size = 151_936
    config.model.num_layers = 48
    config.model.embed_dim = 2048
    config.model.mlp_dim = 6144
    config.model.num_heads = 32
    config.model.num_kv_heads = 4
    config.model.head_dim = 128
    config.model.max_length = 40_960
    config.model.norm_eps = 1e-6
    config.model.rope_theta = 1_000_000.0
    config.model.moe.num_experts = 128
    config.model.moe.experts_per_token = 8
    config.model.moe.expert_dim = 768
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
