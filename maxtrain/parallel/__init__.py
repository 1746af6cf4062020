"""Placement of arrays: mesh axes, logical axes, processes."""
