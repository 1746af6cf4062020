"""Writes models as GGUF files, the format of llama.cpp and of programs built on it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
