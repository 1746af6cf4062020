"""`maxtrain export`: files for other programs."""
