"""llama.cpp, as its users run it, for whoever compares with it."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

# A token that ends the text is not returned; another seed draws another one.
_SEEDS = range(1, 50)


class LlamaCpp:
    """A GGUF file, loaded by llama.cpp: float32 caches, one sequence, no fused attention."""

    def __init__(self, path: Path, length: int = 256):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = length
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = 2
        params.cpuparams_batch.n_threads = 2
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup = False
        params.verbosity = 0
        params.port = 0
        self._server = xllamacpp.Server(params)

    def log_probabilities(self, ids: list[int], vocab_size: int) -> np.ndarray:
        """Return the log-probability of each token after `ids`, float32 [V]."""
        request: dict[str, Any] = {
            "prompt": ids,
            "n_predict": 1,
            "n_probs": vocab_size,
            "temperature": 1.0,
            "cache_prompt": False,
        }
        for seed in _SEEDS:
            answer = self._server.handle_completions(request | {"seed": seed})
            found = answer["choices"][0]["logprobs"]
            if found:
                break
        else:
            raise AssertionError("each token that was drawn ended the text")
        listed = {entry["id"]: entry["logprob"] for entry in found["content"][0]["top_logprobs"]}
        return np.array([listed[i] for i in range(vocab_size)], np.float32)

    def tokenize(self, text: str, begin: bool = False) -> list[int]:
        """The ids of a text; `begin`: with what comes before texts."""
        return self._ask("/tokenize", content=text, add_special=begin, parse_special=False)[
            "tokens"
        ]

    def prompt_of(self, messages: list[dict[str, str]]) -> str:
        """A conversation as text, by the chat template of the file."""
        return self._ask("/apply-template", messages=messages)["prompt"]

    def answer(self, messages: list[dict[str, str]]) -> str:
        """The likeliest answer to a conversation."""
        request = {"messages": messages, "temperature": 0, "max_tokens": 40}
        found = self._server.handle_chat_completions(request)
        return found["choices"][0]["message"]["content"]

    def tokenize_prompt(self, text: str) -> list[int]:
        """The ids of a text that a chat template wrote."""
        return self._ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def _ask(self, path: str, **values: Any) -> Any:
        request = urllib.request.Request(
            self._server.listening_address.rstrip("/") + path,
            json.dumps(values).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
