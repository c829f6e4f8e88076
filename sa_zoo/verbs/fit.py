"""A run from its config to the folder that is published."""

import shlex
from pathlib import Path

from accelerate import PartialState

from sa_zoo.folders.metrics import Metrics
from sa_zoo.training.config import Config
from sa_zoo.training.train import train
from sa_zoo.verbs.finish import finish


def fit(config: Config, out: Path, resume: bool = False) -> Metrics:
    """Train, evaluate and leave a complete run folder, as `sa-zoo train` does; raises what `train` raises."""
    opened = train(config, out, resume)
    if PartialState().is_main_process:
        finish(opened)
    return opened.metrics


def summary(metrics: Metrics, out: Path) -> str:
    """The result of a finished run, and what to do next."""
    assert metrics.test
    result = f"{metrics.model} on {metrics.data}: test accuracy {metrics.test}"
    train = metrics.train
    if train and train.seconds:  # neither is in a metrics.json that only an evaluation wrote
        result += f" after {train.epochs} epochs, {train.seconds / 60:.1f} minutes"
    return (
        f"{result}\n"
        f"the run is in {out}; next: sa-zoo evaluate {shlex.quote(str(out))} --detail, or in Python\n"
        f"  import timm, sa_zoo; timm.create_model('local-dir:{out}', pretrained=True)"
    )
