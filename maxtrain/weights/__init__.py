"""Reads and writes weights in the formats of other programs. The mapping of names is part of the
model family (models/hf_mapping.py)."""
