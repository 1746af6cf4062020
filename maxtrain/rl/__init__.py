"""Reinforcement learning: what completions are worth, and what a policy learns from it.

Rewards, verification and advantages need no jax: numbers go in and out as numpy arrays and lists.
"""
