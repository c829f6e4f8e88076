"""`sa-zoo harden`: continues a run for a few epochs with its heads as taps."""

import json
from collections.abc import Iterable
from pathlib import Path

from sa_zoo.commands.train import train_and_finish
from sa_zoo.opened import Opened
from sa_zoo.training.config import Config, load_config

EPOCHS = 8
SMALL_EPOCHS = 4  # with small images, at most as many as in the run
RATE = 1 / 3  # of the run's learning rate


def harden_run(run: Path, out: Path, changes: Iterable[str], resume: bool) -> Opened:
    """Turn the heads of a trained run into taps, train on, and leave a complete run folder.

    Raises the errors of `train`, and ValueError for a folder without train.toml or heads that cannot be taps.
    """
    return train_and_finish(config_of(run, changes), out, resume)


def config_of(run: Path, changes: Iterable[str] = ()) -> Config:
    """The recipe of the run, shortened and starting from its weights, with `changes` as in `load_config`."""
    recipe = run / "train.toml"
    if not recipe.is_file():
        raise ValueError(f"run: got {run} without train.toml, expected a folder of `sa-zoo train`")
    trained = load_config(recipe)
    continued = (
        f"model.init={json.dumps(str(run))}",
        "model.whiten=false",
        "model.harden=true",
        f"augment.small_epochs={min(SMALL_EPOCHS, trained.augment.small_epochs)}",
        f"optim.lr={trained.optim.lr * RATE}",
        f"train.epochs={EPOCHS}",
        "train.head_epochs=0",
    )
    return load_config(recipe, [*continued, *changes])
