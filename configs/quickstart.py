"""A Llama of 7 M parameters on the source of Python's standard library: the first run for a new
user.

Data: `make quickstart` prepares it (a BPE tokenizer of 4,096 entries, the interpreter's own
  library, a share held out).
Reaches: 4.0667 nats a token, 1.7488 bits per byte, on the held-out files (gzip -9: 1.9169);
  completions that look like Python. Measured on 2 cores with AMX, on the library of one version of
  Python; other versions have another text.
Costs: 1:48 there, compile included; two to three minutes on 2 cores.
"""

from maxtrain.config import default_config


def get_config():
    config = default_config()
    config.run_name = "quickstart"
    config.steps = 320
    config.eval_interval = 160
    config.checkpoint_interval = 160

    config.model.num_layers = 8
    config.model.embed_dim = 256
    config.model.mlp_dim = 704
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.tie_embeddings = True
    config.model.max_length = 1024
    config.model.rope_theta = 10_000.0
    config.model.loss_chunk = 512  # small enough for a CPU's cache
    config.model.scan_layers = False  # eight small layers: a fast step is worth the slower compile

    config.data.sources.stdlib = {"path": "data/stdlib/train"}
    config.data.seq_length = 256
    config.data.batch_size = 8
    config.eval.sets.heldout = {"path": "data/stdlib/eval"}

    config.optimizer.learning_rate = 2e-3
    config.schedule.min_lr_ratio = 0.1
    config.schedule.warmup_steps = 40

    config.observe.prompts = ("def __init__(self, ", "import os\n", "    for key, value in ")
    return config
