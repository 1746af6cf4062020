"""Llama 3 8B, pretraining from random weights: 8.03 B parameters, a row of 8,192 tokens.

Data: any shards with the Llama 3 tokenizer, here data/fineweb/train; one pass over them.
Reaches: not run. The shapes are those of the published weights, so checkpoint.init_from can load
  them.
Costs: computed, not measured: about 5.5e10 FLOP a token, so 1 B tokens are about 40 H100 hours at
  40 % of the peak; parameters, gradients and optimizer state take 128 GB in float32, split over
  mesh.fsdp.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "llama3_8b"
    config.eval_interval = 1000

    config.model.vocab_size = 128_256
    config.model.num_layers = 32
    config.model.embed_dim = 4096
    config.model.mlp_dim = 14_336
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.max_length = 8192
    config.model.remat = "full"

    config.data.sources.fineweb = {"path": "data/fineweb/train"}
    config.data.seq_length = 8192
    config.data.batch_size = 128  # 1 M tokens
    config.data.workers = 4
    config.eval.sets.fineweb = {"path": "data/fineweb/eval"}

    config.optimizer.learning_rate = 3e-4
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 2000
    return config
