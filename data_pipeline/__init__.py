"""Documents to token shards to the batch of step s. Knows numpy and grain; never jax, never
maxtrain."""
