"""LoRA fine-tuning of Qwen2.5-1.5B-Instruct on GSM8K, with reasoning and answer in tags: 1.54 B
parameters, of which 18 M are trained.

Data: GSM8K prepared into data/gsm8k as in docs/fine_tuning.md; three passes. For other
  conversations set data.sources.gsm8k.path.
Reaches: not run.
Costs: computed, not measured: about 7e9 FLOP a token and 1.7 M tokens a pass, so minutes on an
  H100; weights take 6 GB in float32, or 1 GB with model.lora.base=nf4 beside those of the
  embedding.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "sft_lora_qwen2_5_1_5b"
    config.eval_at_start = True
    config.eval_interval = "0.5 epochs"
    config.checkpoint_interval = "0.5 epochs"
    config.checkpoint.keep_best = True

    # The directory of the weights; the shapes below are theirs.
    config.checkpoint.init_from = "pretrained"
    config.model.family = "qwen2"
    config.model.vocab_size = 151_936
    config.model.num_layers = 28
    config.model.embed_dim = 1536
    config.model.mlp_dim = 8960
    config.model.num_heads = 12
    config.model.num_kv_heads = 2
    config.model.tie_embeddings = True
    config.model.max_length = 32_768
    config.model.norm_eps = 1e-6
    config.model.rope_theta = 1_000_000.0
    config.model.remat = "full"
    config.model.lora.rank = 16
    config.model.lora.alpha = 32.0

    config.data.sources.gsm8k = {"path": "data/gsm8k/train", "epochs": 3}
    config.data.packing = "bins"  # conversations stay whole, and do not see each other
    config.data.seq_length = 1024
    config.data.batch_size = 16  # about 70 conversations
    config.eval.sets.held_out = {"path": "data/gsm8k/eval"}

    config.optimizer.learning_rate = 2e-4
    config.optimizer.weight_decay = 0.0
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 10
    return config
