"""Speed of decoding with transformers; run by `benchmarks.generation` with a Python that has torch.

    python benchmarks/transformers_decode.py DIRECTORY DTYPE PROMPT TOKENS ROWS [ROWS ...]

prints {"ROWS": tokens per second of all rows together} as JSON. Greedy, with transformers' own cache,
without the time for the prompt: the median of several stretches of tokens.
"""

import json
import os
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, StaticCache

STRETCHES = 5


def rate(model: torch.nn.Module, prompt: int, tokens: int, rows: int) -> float:
    """Tokens per second."""
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt))
    cache = StaticCache(config=model.config, max_cache_len=prompt + tokens)
    logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
    times = []
    each = tokens // STRETCHES
    for _ in range(STRETCHES):
        begin = time.perf_counter()
        for _ in range(each):
            newest = logits.argmax(-1, keepdim=True)
            logits = model(newest, past_key_values=cache, use_cache=True).logits[:, -1]
        times.append(time.perf_counter() - begin)
    return rows * each / statistics.median(times)


def main() -> None:
    directory, dtype, prompt, tokens, *rows = sys.argv[1:]
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    found = {}
    with torch.inference_mode():
        for count in rows:
            found[count] = rate(model, int(prompt), int(tokens), int(count))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
