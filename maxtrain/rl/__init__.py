"""Reinforcement learning: rollouts, rewards, advantages and the batches made of them.

Rewards, verification and advantages need no jax: they take and return numpy arrays and lists.
"""
