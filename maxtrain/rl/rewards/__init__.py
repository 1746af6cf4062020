"""Rewards of completions: one file for each, all of one kind; and the processes they run in."""
