"""A small pretrained model with a tokenizer of its own, for whoever needs text of one."""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

PARITY = Path(__file__).parents[1] / "data" / "parity"
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")


def write(folder: Path) -> None:
    """Weights of 160 entries, of which the tokenizer has those of ASCII and three special ones, of
    which chatml needs two."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(PARITY / "llama3" / name, folder / name)
    vocabulary = {"\n": 0}
    for code in range(32, 127):
        vocabulary[chr(code)] = len(vocabulary)
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(SPECIAL))
    inner.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
