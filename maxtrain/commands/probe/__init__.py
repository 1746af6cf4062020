"""`maxtrain probe`: batch size and learning rate."""
