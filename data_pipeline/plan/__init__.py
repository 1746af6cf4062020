"""The data plan: which rows step s reads, from order, mixture, stages and epochs."""
