"""Batches: reading, packing, corruption, checks, and worker processes."""
