"""`maxtrain doctor`: what all hosts and devices of a job can do, and what is broken."""
