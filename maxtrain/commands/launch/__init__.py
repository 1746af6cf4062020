"""`maxtrain launch`: start jobs of one or many processes, here, by Slurm or by Kubernetes."""
