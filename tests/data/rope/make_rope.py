"""Makes the files of this folder: what transformers computes for scaled rotary positions.

    python tests/data/rope/make_rope.py

cases.json   the rope keys of a config.json, by case; and those of DeepSeek, by family and case
tables.npz   CASE/LENGTH/cos and .../sin [T, H / 2] of a row of LENGTH tokens, CASE/factor, float32
logits.npz   FAMILY/CASE [B, T, V] float32: logits of tests/data/parity/FAMILY with other rope keys

Made with torch 2.13 and transformers 5.23, which the tests do not need.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
PARITY = HERE.parent / "parity"
HEAD_DIM = 16
ORIGINAL = 16
# Below, at and above the original length.
LENGTHS = (9, 16, 17, 40)
SHORT = [1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0]
LONG = [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": SHORT,
    "long_factor": LONG,
}
# Of each case, rope_parameters and max_position_embeddings.
CASES = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, ORIGINAL),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        128,
    ),
    "yarn": (YARN, 64),
    "yarn_untruncated": ({**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 0.5}, 64),
    "yarn_attention_factor": ({**YARN, "attention_factor": 1.3}, 64),
    "yarn_mscale_equal": ({**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, 64),
    "yarn_mscale_unequal": ({**YARN, "mscale": 1.4, "mscale_all_dim": 0.6}, 64),
    "yarn_mscale_alone": ({**YARN, "mscale": 1.4}, 64),
    "longrope": (LONGROPE, 64),
    "longrope_attention_factor": ({**LONGROPE, "attention_factor": 1.2}, 64),
}
_LATENT = {**YARN, "rope_theta": 10_000.0, "factor": 8.0}
DEEPSEEK = {
    "equal": {**_LATENT, "mscale": 0.707, "mscale_all_dim": 0.707},
    "unequal": {**_LATENT, "mscale": 1.4, "mscale_all_dim": 0.6},
    "none": _LATENT,
}


def tables() -> dict[str, np.ndarray]:
    found = {}
    for name, (rope, longest) in CASES.items():
        config = transformers.LlamaConfig(
            head_dim=HEAD_DIM,
            max_position_embeddings=longest,
            rope_parameters={"rope_theta": 10_000.0, **rope},
        )
        for length in LENGTHS:
            # A new one each time: those that follow lengths remember them.
            module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            cos, sin = module(torch.zeros(1), torch.arange(length)[None])
            half = HEAD_DIM // 2
            found[f"{name}/{length}/cos"] = cos[0, :, :half].numpy()
            found[f"{name}/{length}/sin"] = sin[0, :, :half].numpy()
            found[f"{name}/factor"] = np.float32(module.attention_scaling)
    return found


def logits() -> dict[str, np.ndarray]:
    found = {}
    for family in ("deepseek_v2", "deepseek_v3"):
        tokens = torch.from_numpy(np.load(PARITY / family / "reference.npz")["tokens"]).long()
        for name, rope in DEEPSEEK.items():
            config = transformers.AutoConfig.from_pretrained(PARITY / family)
            config.rope_parameters = dict(rope)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                PARITY / family, config=config, attn_implementation="eager", dtype=torch.float32
            )
            with torch.no_grad():
                out = model.eval()(tokens, use_cache=False).logits
            found[f"{family}/{name}"] = out.numpy()
    return found


if __name__ == "__main__":
    said = {
        "head_dim": HEAD_DIM,
        "lengths": LENGTHS,
        "tables": {
            name: {
                "max_position_embeddings": longest,
                "rope_parameters": {"rope_theta": 10_000.0, **rope},
            }
            for name, (rope, longest) in CASES.items()
        },
        "deepseek": DEEPSEEK,
    }
    (HERE / "cases.json").write_text(json.dumps(said, indent=1) + "\n")
    np.savez_compressed(HERE / "tables.npz", **tables())
    np.savez_compressed(HERE / "logits.npz", **logits())
