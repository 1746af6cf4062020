"""Generation with a KV cache: many texts side by side, each with the same result as if it were
alone."""
