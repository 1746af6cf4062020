"""`maxtrain evaluate`: losses, tasks and texts."""
