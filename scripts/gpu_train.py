"""The steps of gpu_day.py that train: they choose a learning rate, and train each model within its time."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import timm
from gpu_measure import rows_of
from gpu_plan import Day, Record

from sa_zoo.training.config import Config, load_config
from sa_zoo.training.train import train
from sa_zoo.verbs.fit import fit

# The recipe of the small models (configs/tiny.toml), and of their longest run
SMALL_IMAGES = 14 / 23  # share of epochs
LONG = 60  # epochs, from which images are mixed
MIXED = ["augment.mixup=0.8", "augment.cutmix=1.0"]
MARGIN = 0.93  # of the time that a run is planned for: its speed varies
SAVE_SECONDS = 20  # of training between two checkpoints
WORTH_COMPILING = 1.1  # times the speed without


def recipe(day: Day, model: str, rate: float, epochs: int, *more: str) -> Config:
    """The recipe of the small models, for so many epochs of another one."""
    values = {
        "model.name": model,
        "data.name": day.source(),
        "data.title": day.title,
        "optim.lr": rate,
        "train.epochs": epochs,
        "train.batch_size": day.scale.batch,
        "augment.small_epochs": round(SMALL_IMAGES * epochs),
    }
    if timm.get_pretrained_cfg(model).fixed_input_size:
        values["augment.small_epochs"] = 0
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if epochs >= LONG:
        overrides += MIXED
    return load_config("tiny", [*overrides, *more])


@dataclass(frozen=True)
class Timing:
    """Seconds of a short run: per epoch, on average over the recipe, and for everything else; steps of an epoch."""

    epoch: float
    rest: float
    steps: int

    def epochs_in(self, seconds: float) -> int:
        """How many epochs a run of so many seconds may have; at least one."""
        return max(1, int((MARGIN * seconds - self.rest) / self.epoch))


def timing(day: Day, model: str) -> Timing:
    """Time a run of a few epochs from its start, with small images and with others if the recipe has both."""
    out = day.out / "timing" / model
    shutil.rmtree(out, ignore_errors=True)
    config = recipe(day, model, day.scale.rates[0], 4)
    if config.augment.small_epochs:
        config = recipe(day, model, day.scale.rates[0], 4, "augment.small_epochs=2")
    start = time.monotonic()
    metrics = fit(config, out)
    total = time.monotonic() - start
    history = (out / "history.jsonl").read_text(encoding="utf-8").splitlines()
    ends = [json.loads(line)["seconds"] for line in history]
    # the second epoch of each size; the first one compiles and allocates
    small, full = ends[1] - ends[0], ends[3] - ends[2]
    share = SMALL_IMAGES if config.augment.small_epochs else 0.0
    steps = metrics.train.n // day.scale.batch
    return Timing(share * small + (1 - share) * full, total - 2 * (small + full), steps)


def rates(day: Day, record: Record) -> None:
    """Choose the learning rate of all models by short runs of the first one, on held-out images."""
    model = next(iter(day.scale.trained))
    if "epochs" not in record.found:
        measured = timing(day, model)
        record.add(model=model, epochs=measured.epochs_in(record.left() / len(day.scale.rates)))
    accuracies = record.found.get("accuracies", {})
    for rate in day.scale.rates:
        if str(rate) not in accuracies:
            config = recipe(day, model, rate, record.found["epochs"])
            out = day.out / "rates" / str(rate)
            metrics = train(config, out, resume=is_begun(out)).metrics
            accuracies[str(rate)] = metrics.validation.top1
            record.add(accuracies=accuracies)
    record.add(rate=float(max(accuracies, key=accuracies.get)))


def train_model(day: Day, record: Record) -> None:
    """Train one model for as many epochs as the step has time for, which are written down before the run begins."""
    model = record.name.removeprefix("train-")
    if "epochs" not in record.found:
        if record.left() <= 0:
            raise TimeoutError("no time was left to train")
        chosen = Record(day.out, "rates").found.get("rate", day.scale.rates[0])
        mode = compile_mode(day, model)
        with compiled(mode):
            measured = timing(day, model)
        record.add(
            rate=chosen,
            compiled=mode,
            seconds_per_epoch=measured.epoch,
            checkpoint_steps=measured.steps * max(1, round(SAVE_SECONDS / measured.epoch)),
            epochs=measured.epochs_in(record.left()),
        )
    plan = record.found
    saving = f"train.checkpoint_steps={plan['checkpoint_steps']}"
    config = recipe(day, model, plan["rate"], plan["epochs"], saving)
    out = day.out / "runs" / model
    with compiled(plan["compiled"]):
        fit(config, out, resume=is_begun(out))


def is_begun(out: Path) -> bool:
    """Whether the folder has a run to resume."""
    return (out / "train.toml").is_file()


def compile_mode(day: Day, model: str) -> str:
    """The mode of torch.compile to train with: none, unless it was measured to be worth it."""
    speeds = {
        row["subject"]: row["speed"]
        for row in rows_of(day.out / "speed.json")
        if (row["model"], row["phase"]) == (model, "training, bfloat16")
    }
    faster = speeds.get("compiled", 0.0) > WORTH_COMPILING * speeds.get("as built", math.inf)
    return day.scale.compiled if faster else ""


@contextmanager
def compiled(mode: str) -> Iterator[None]:
    """Let accelerate compile what it prepares, in a mode of torch.compile; not at all if that is empty."""
    settings = {"ACCELERATE_DYNAMO_BACKEND": "inductor", "ACCELERATE_DYNAMO_MODE": mode}
    if not mode:
        settings = {"ACCELERATE_DYNAMO_BACKEND": "no"}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
