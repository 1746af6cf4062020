"""Runs behind a URL: their lock, their records, and the folder of this host that is worked in."""
