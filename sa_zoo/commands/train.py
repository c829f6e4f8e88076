"""A run, from its recipe to the folder to publish."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sa_zoo.commands.finish import finish
from sa_zoo.data.progress import is_main_process
from sa_zoo.opened import Opened
from sa_zoo.training.config import load_config, run_name
from sa_zoo.training.train import train


def train_recipe(
    recipe: str | Path,
    out: str | Path = "",
    data: str | Path = "",
    changes: str | Sequence[str] = (),
    resume: bool = False,
    model: str = "",
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
) -> Opened:
    """Train a model, evaluate it, and leave a complete run folder, as `sa-zoo train` does.

        run = sa_zoo.train("photographs", "runs/mine", data="data/images", epochs=4)
        print(run.metrics.test.top1, run.folder)
        logits = run.network(images)

    Args:
        recipe: a TOML file, or the name of one in configs/.
        out: run folder; default: runs/RECIPE, or runs/RECIPE-MODEL with another model.
        data: Hub data set, folder or "digits"; default: the data of the recipe.
        changes: values to replace, "section.key=value".
        resume: resume the run in `out`.
        model, epochs, lr, batch_size: values of model.name, train.epochs, optim.lr and train.batch_size.

    Raises:
        The errors of `sa_zoo.training.train.train`.
    """
    changes = [changes] if isinstance(changes, str) else list(changes)
    values = {
        "data.name": str(data) or None,
        "model.name": model or None,
        "train.epochs": epochs,
        "optim.lr": lr,
        "train.batch_size": batch_size,
    }
    given = {key: value for key, value in values.items() if value is not None}
    changes = [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()
    ] + changes
    config = load_config(recipe, changes)
    run = train(config, Path(out or f"runs/{run_name(recipe, changes)}"), resume)
    return finish(run) if is_main_process() else run


def summary(run: Opened) -> str:
    """The result of a finished run, and the next commands."""
    metrics = run.metrics
    result = f"{metrics.model} on {metrics.data}: test accuracy {metrics.test}"
    train = metrics.train
    folder = run.local_folder
    with suppress(ValueError):  # not in the working folder
        folder = folder.relative_to(Path.cwd())
    if train and train.seconds:  # missing in a metrics.json written by an evaluation only
        result += f" after {train.epochs} epochs, {train.seconds / 60:.1f} minutes"
    return (
        f"{result}\n"
        f"the run is in {folder}; next: sa-zoo evaluate {shlex.quote(str(folder))} --detail, or in Python\n"
        f"  import timm, sa_zoo; timm.create_model('local-dir:{folder}', pretrained=True)"
    )
