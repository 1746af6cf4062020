"""Errors, exit codes, optional packages, URLs and strict parsers: what both packages use."""
