"""Generation with a KV cache: many texts side by side, each as if it were alone."""
