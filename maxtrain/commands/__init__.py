"""The verbs of the command line, a file or a folder for each."""
