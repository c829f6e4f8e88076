"""Trains any timm model on any labelled images, and leaves a run folder.

What a run computes is a function of its config alone: a run that was killed and resumed ends, on a CPU, with the very
weights of one that was not. Two processes follow the curve of one, as batch_size counts images over all of them; what
draws random numbers inside the model (dropout), or looks at a part of a batch (mixup, batch norm), differs.
The last incomplete batch of an epoch is dropped; another order drops other images in the next.
What is published and reported is the last epoch (its weight average, where train.ema asks for one), never the best.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from sa_zoo.cost import training_macs
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import Config
from sa_zoo.training.data import InputFormat, Splits, open_source, splits_of
from sa_zoo.training.evaluate import BATCH_SIZE, evaluate, open_accelerator
from sa_zoo.training.loop import Run
from sa_zoo.training.model import create_model, input_format, load_model
from sa_zoo.training.progress import Interruption, Progress
from sa_zoo.training.run_folder import begin_run, check_run, environment, finish, publish_weights
from sa_zoo.training.whitening import whiten_first_convolution


def fit(config: Config, out: Path, resume: bool = False) -> dict[str, Any]:
    """Trains, publishes the last epoch into `out`, evaluates what it published; returns the content of metrics.json.

    Raises Interrupted after Ctrl-C and FloatingPointError where the loss is not finite, both with a checkpoint to
    resume from; FileExistsError, FileNotFoundError or ValueError where config, data or folder do not allow the run.
    """
    train, accelerator = config.train, _accelerator(config, out)
    if finished := check_run(out, config, resume):
        return finished
    with accelerator.main_process_first():  # who fetches the data for all
        source = open_source(config.data)
    torch.manual_seed(config.train.seed)
    model = create_model(config.model, len(source.classes), config.data.image_size)
    model = model.to(accelerator.device, memory_format=torch.channels_last)
    form = input_format(model, config.data.image_size)
    splits = splits_of(source, config.data.validation, form, accelerator.device)
    if config.model.whiten:
        whiten_first_convolution(model, form.normalise(splits.train.images[:5000]))
    macs = training_macs(model, form.input_size)
    small = training_macs(model, (form.input_size[0], config.augment.small_size, config.augment.small_size))
    augment = Augment(config.augment, train.seed, len(source.classes), form.normalise, accelerator.device)
    run = Run(config, out, accelerator, model, splits.train, augment)
    if accelerator.is_main_process:
        begin_run(out, config)
    run.restore()
    _loop(run, splits, form)
    if accelerator.is_main_process:
        publish_weights(out, run.averaged, form, source.classes)
    accelerator.wait_for_everyone()
    metrics = {
        "model": config.model.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": source.name,
        "data_revision": config.data.revision,
        **_measured(out, splits, accelerator),
        "train": {
            "seconds": run.counters.seconds,
            "cpu_seconds": run.counters.cpu_seconds,
            "macs_per_image": macs,
            "pflop": 3
            * 2
            * (macs * run.total - (macs - small) * config.augment.small_epochs * run.steps * train.batch_size)
            / 1e15,  # a backward pass costs two forward passes, a MAC 2 operations
            "epochs": config.train.epochs,
            "images_per_second": run.images_per_second(),
            "n": len(splits.train),
        },
        "environment": environment(accelerator.device, accelerator.num_processes),
    }
    if accelerator.is_main_process:
        finish(out, metrics)
    accelerator.end_training()
    return metrics


def _accelerator(config: Config, out: Path) -> Accelerator:
    train = config.train
    if train.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("train.precision: got fp16, expected bf16 or no on a CPU")
    if train.tracker and find_spec(train.tracker) is None:
        raise ValueError(f"train.tracker: got {train.tracker}, which is not installed: pip install 'sa_zoo[tracking]'")
    return open_accelerator(
        mixed_precision=train.precision,
        gradient_accumulation_steps=train.accumulation,
        log_with=train.tracker or None,
        project_dir=str(out) if train.tracker else None,
    )


def _loop(run: Run, splits: Splits, form: InputFormat) -> None:
    accelerator, train = run.accelerator, run.config.train
    validation = accelerator.prepare(splits.validation.loader(train.batch_size))
    if train.tracker:
        accelerator.init_trackers(train.tracker, _flat(run.config.model_dump()))
    progress = Progress(run.total, run.images_done(), train.epochs, accelerator.is_main_process)
    with Interruption() as run.interruption, progress as run.progress:
        while run.counters.epoch < train.epochs:
            run.train_epoch()
            found = {}
            if len(splits.validation):
                with accelerator.autocast():
                    found = evaluate(run.averaged, validation, form, accelerator)
            record = run.end_epoch(found)
            progress.epoch(record, run.images_per_second())
            if train.tracker:
                accelerator.log(_flat(record), step=record["epoch"])


def _measured(out: Path, splits: Splits, accelerator: Accelerator) -> dict[str, Any]:
    """Test, for the only time, and validation, in full precision, of the model as the run folder gives it."""
    model = load_model(str(out)).to(accelerator.device)
    form = input_format(model)
    measured = {}
    for name in ("test", "validation"):
        split = getattr(splits, name)
        if len(split):
            loader = accelerator.prepare(split.loader(BATCH_SIZE))
            measured[name] = evaluate(model, loader, form, accelerator)
    return measured


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return flat
