"""`maxtrain teach`: log-probabilities of a teacher, stored for distillation."""
