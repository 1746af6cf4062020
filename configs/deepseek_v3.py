"""DeepSeek V3, pretraining from random weights: 671 B parameters, of which 37.5 B are active per
token.

Data: any shards with the DeepSeek tokenizer, here data/fineweb/train; one pass over them.
Reaches: not run. The shapes are those of the published weights, whose context was extended later
  (model.rope_scaling=yarn). There is no second head that predicts two tokens ahead.
Costs: computed, not measured: about 2.5e11 FLOP a token, so 1 B tokens are about 180 H100 hours at
  40 % of the peak; parameters and optimizer state take 8.1 TB in float32, split over mesh.expert
  and mesh.fsdp.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "deepseek_v3"
    config.eval_interval = 1000

    config.model.family = "deepseek_v3"
    config.model.vocab_size = 129_280
    config.model.num_layers = 61
    config.model.embed_dim = 7168
    config.model.mlp_dim = 18_432
    config.model.num_heads = 128
    config.model.num_kv_heads = 128
    config.model.head_dim = 192
    config.model.max_length = 4096
    config.model.norm_eps = 1e-6
    config.model.rope_theta = 10_000.0
    config.model.latent.query_rank = 1536
    config.model.moe.num_experts = 256
    config.model.moe.experts_per_token = 8
    config.model.moe.expert_dim = 2048
    config.model.moe.shared_dim = 2048
    config.model.moe.scale = 2.5
    config.model.moe.num_groups = 8
    config.model.moe.top_groups = 4
    config.model.moe.dense_layers = 3
    config.model.routing.balance = 1e-4
    config.model.remat = "full"
    config.mesh.preset = "moe"

    config.data.sources.fineweb = {"path": "data/fineweb/train"}
    config.data.seq_length = 4096
    config.data.batch_size = 512  # 2 M tokens
    config.data.workers = 4
    config.eval.sets.fineweb = {"path": "data/fineweb/eval"}

    config.optimizer.learning_rate = 2.2e-4
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 2000
    return config
