"""Rules across the sections of a config, in files named for what they relate."""
