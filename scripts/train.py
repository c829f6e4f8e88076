"""accelerate launch scripts/train.py configs/quickstart.toml [--out RUN_DIR] [--set key=value]... [--resume]"""

import typer

from sa_zoo.cli import train

typer.run(train)
