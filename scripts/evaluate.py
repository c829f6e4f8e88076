"""accelerate launch scripts/evaluate.py RUN_DIR [--data NAME] [--json OUT] [--detail]"""

import typer

from sa_zoo.cli import evaluate

typer.run(evaluate)
