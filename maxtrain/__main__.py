"""`python -m maxtrain VERB ...`: the same as the command `maxtrain`."""

import sys

from maxtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
