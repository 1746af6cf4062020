"""What is minimised, recorded and evaluated: one file for each objective, all of one kind."""
