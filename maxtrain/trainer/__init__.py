"""The training run: open the data, build, restore, loop, finish."""
