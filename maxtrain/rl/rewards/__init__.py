"""Rewards of completions, one file for each, and the processes that they run in."""
