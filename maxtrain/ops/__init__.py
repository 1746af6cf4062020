"""Pure functions on arrays. Every fast path has a slow oracle beside it, and a test that both
agree, forward and backward."""
