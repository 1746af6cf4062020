"""The jitted step and what it needs: optimizer, objective, state, evaluation."""
