"""`python -m data_pipeline.prepare OUT ...`: the same as `maxtrain prepare`."""

import sys

from data_pipeline.prepare.command import main

if __name__ == "__main__":
    sys.exit(main())
