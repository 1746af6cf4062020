"""How a job of one or many processes is started: on this machine, by Slurm, or by Kubernetes."""
