"""Reinforcement learning (GRPO) of Qwen2.5-1.5B-Instruct on GSM8K, on one H200: 1.54 B parameters.

Data: the questions of GSM8K prepared into data/gsm8k-prompts as in docs/fine_tuning.md; one pass.
Reaches: not run. verl reports 77.9 % of the test questions for this model with GRPO.
Costs: computed, not measured: parameters, gradients and optimizer state take 25 GB in float32; a
  step samples 256 completions, whose caches take at most 7.5 GB with grpo.slots=128.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "grpo_qwen2_5_1_5b"
    config.objective = "grpo"
    config.checkpoint_interval = 50
    config.observe.sample_interval = 10

    # The directory of the weights, or a run that was fine-tuned before; the shapes below are
    # theirs.
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

    config.data.sources.gsm8k = {"path": "data/gsm8k-prompts/train"}
    config.data.packing = "pad"
    config.data.seq_length = 1024  # a prompt and its completion
    config.data.batch_size = 32  # prompts in a step
    config.grpo.rewards = ("gsm8k",)
    config.grpo.num_generations = 8
    config.grpo.max_completion_length = 512
    config.grpo.slots = 128
    config.grpo.epsilon_high = 0.28
    config.optimizer.accumulation = 4

    config.optimizer.learning_rate = 1e-6
    config.optimizer.weight_decay = 0.0
    config.optimizer.clip_norm = 0.2
    config.schedule.name = "constant"
    config.schedule.warmup_steps = 10
    return config
