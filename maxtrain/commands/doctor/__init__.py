"""`maxtrain doctor`: measure devices, network and disks of all hosts."""
