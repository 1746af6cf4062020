"""`maxtrain merge`: one model from several. The arithmetic needs no jax."""
