"""The jitted train step and its parts: state, optimizer, loss scale, norms, evaluation."""
