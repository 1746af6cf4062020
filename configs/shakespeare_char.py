"""nanoGPT's CPU recipe for characters of Shakespeare, with Llama blocks: 0.8 M parameters.

Data: the tiny Shakespeare text, 1.1 MB, characters as tokens, the last tenth held out, prepared
  into data/shakespeare_char.
Reaches: 1.6396 nats per character of the held-out text, 2.3655 bits per byte (gzip -9: 3.1907).
Costs: 2,000 steps of 768 characters, four minutes on 2 cores.
Differs: SwiGLU of 344 instead of GELU of 512 (as many parameters), RMSNorm, RoPE; the whole
  held-out text is evaluated.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "shakespeare_char"
    config.steps = 2000
    config.eval_interval = 250
    config.checkpoint_interval = 500

    config.model.num_layers = 4
    config.model.embed_dim = 128
    config.model.mlp_dim = 344
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.tie_embeddings = True
    config.model.max_length = 64
    config.model.rope_theta = 10_000.0
    config.model.scan_layers = False

    config.data.sources.shakespeare = {"path": "data/shakespeare_char/train", "epochs": None}
    config.data.seq_length = 64
    config.data.batch_size = 12
    config.eval.sets.heldout = {"path": "data/shakespeare_char/eval"}
    config.eval.batch_size = 64

    config.optimizer.learning_rate = 1e-3
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 100
    config.optimizer.beta2 = 0.99
    config.precision.compute = "float32"
    return config
