"""Saving and restoring runs: files, digests, retention, mirrors."""
