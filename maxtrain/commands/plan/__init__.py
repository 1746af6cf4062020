"""`maxtrain plan`: what a run reads, and when."""
