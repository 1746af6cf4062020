"""Llama 3 405B, pretraining from random weights: 406 B parameters, a row of 8,192 tokens.

Data: any shards with the Llama 3 tokenizer, here data/fineweb/train; one pass over them.
Reaches: not run. The shapes are those of the published weights, whose context was extended later
  (model.rope_scaling=llama3).
Costs: computed, not measured: about 2.5e12 FLOP a token, so 1 B tokens are about 1,800 H100 hours
  at 40 % of the peak; parameters and optimizer state take 4.9 TB in float32, split over mesh.fsdp.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "llama3_405b"
    config.eval_interval = 1000

    config.model.vocab_size = 128_256
    config.model.num_layers = 126
    config.model.embed_dim = 16_384
    config.model.mlp_dim = 53_248
    config.model.num_heads = 128
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.max_length = 8192
    config.model.remat = "full"

    config.data.sources.fineweb = {"path": "data/fineweb/train"}
    config.data.seq_length = 8192
    config.data.batch_size = 512  # 4 M tokens
    config.data.workers = 4
    config.eval.sets.fineweb = {"path": "data/fineweb/eval"}

    config.optimizer.learning_rate = 8e-5
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 2000
    return config
