"""accelerate launch scripts/evaluate.py RUN_DIR [--data NAME] [--json OUT] [--detail]"""

import sys

from sa_zoo.cli import app

if __name__ == "__main__":  # processes that load images import this file
    app(["evaluate", *sys.argv[1:]], prog_name="sa-zoo")
