"""The sections of a run's config, a file each: the keys, and beside them what must hold inside.

A section knows itself alone. What must hold across sections is in `maxtrain.config.across`.
"""
