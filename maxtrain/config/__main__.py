"""`python -m maxtrain.config config=NAME [key=value ...]`: check a config without starting anything, and print it resolved."""

import sys

from maxtrain.config.load import from_command_line, to_yaml

if __name__ == "__main__":
    print(to_yaml(from_command_line(sys.argv[1:], "python -m maxtrain.config")), end="")
