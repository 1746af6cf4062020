"""Faults on purpose against real runs, and what they leave behind; `python -m benchmarks.chaos
--help`."""
