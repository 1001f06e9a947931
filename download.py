"""Fetch a model or a data set from the Hugging Face hub: python download.py --help."""

import sys

from flexengine.checkpoint.download import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
