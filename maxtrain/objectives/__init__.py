"""Training objectives: what is minimised, recorded and evaluated. One file for each objective."""
