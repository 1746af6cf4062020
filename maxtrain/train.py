"""`python -m maxtrain.train config=NAME key=value ...`: the same as `maxtrain train`."""

import sys

from maxtrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], ends_process=True))
