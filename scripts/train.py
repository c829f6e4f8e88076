"""accelerate launch scripts/train.py quickstart [--out RUN_DIR] [--set key=value]... [--resume]"""

import sys

from sa_zoo.cli import app

if __name__ == "__main__":  # processes that load images import this file
    app(["train", *sys.argv[1:]], prog_name="sa-zoo")
