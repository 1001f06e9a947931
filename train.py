"""Train a model under declared GPU and host memory budgets: `python train.py --model DIR --max-gpu-mem-gib 24 ...`"""

import sys

from flexengine.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
