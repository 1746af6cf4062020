"""One model of several: the arithmetic, and the recipe. No jax here."""
