"""Models as GGUF files, which llama.cpp and programs built on it load.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
