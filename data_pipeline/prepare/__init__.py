"""The command `prepare`: documents become token shards."""
