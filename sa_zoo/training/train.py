"""Trains any timm model on any labeled images, and leaves a run folder that timm loads.

What a run computes is a function of its config: one that was killed and resumed on a CPU ends with exactly the weights
of an uninterrupted one. Two processes follow the curve of one; only randomness inside the model (dropout) and what
depends on the micro-batch (mixup, batch norm) differ. The last incomplete batch of each epoch is dropped.
The last epoch is published and reported (its weight average if train.ema asks for one), never the best.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils.generic import flatten_dict

from sa_zoo.folders.cost import training_macs
from sa_zoo.folders.metrics import Metrics, Scores, Training, environment
from sa_zoo.folders.opened import load_model
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import Config
from sa_zoo.training.device import open_accelerator, report_lost_process
from sa_zoo.training.evaluate import BATCH_SIZE, evaluate
from sa_zoo.training.loop import Run
from sa_zoo.training.model import InputFormat, check_output, create_model, input_format_of
from sa_zoo.training.progress import interruption
from sa_zoo.training.run_folder import (
    IMAGES,
    begin_run,
    check_run,
    end_run,
    record_heads,
    record_maps,
    remove_checkpoints,
)
from sa_zoo.training.sources import open_source
from sa_zoo.training.splits import Split, splits_of
from sa_zoo.training.whitening import whiten_first_convolution


@report_lost_process()
def train(config: Config, out: Path, resume: bool = False) -> Metrics:
    """Train, write the last epoch into `out`, evaluate what was written; returns the content of metrics.json.

    Raises Interrupted after Ctrl-C and FloatingPointError if the loss is not finite, both with a checkpoint to resume
    from; ConnectionError if a process of the run or of its loader has ended; FileExistsError, FileNotFoundError or
    ValueError if config, data or folder do not allow the run.
    """
    accelerator = _accelerator(config, out)
    if finished := check_run(out, config, resume):
        if accelerator.is_main_process:
            remove_checkpoints(out)  # the run may have been killed before it did
        return finished
    with accelerator.main_process_first():  # it downloads the data for all
        source = open_source(config.data)
    torch.manual_seed(config.train.seed)
    device, classes, image_size = accelerator.device, source.classes, config.data.image_size
    model = (
        create_model(config.model, len(classes), image_size)
        .to(device)
        .to(memory_format=torch.channels_last)
    )
    input_format = input_format_of(model, image_size)
    splits = splits_of(source, config.data.validation, input_format, device)
    if config.model.whiten:
        whiten_first_convolution(model, splits["train"], input_format)
    pflop = _pflop(model, config, input_format, len(splits["train"]) // config.train.batch_size)
    check_output(model, input_format.input_size, len(classes))
    augment = Augment(
        config.augment, config.train.seed, len(classes), input_format.normalize, device
    )
    run = Run(config, out, accelerator, model, splits["train"], augment)
    if accelerator.is_main_process:
        begin_run(out, config)
        if not run.images_done():
            record_heads(out, run.averaged, epoch=0)
    _loop(run, splits["validation"], input_format)
    if accelerator.is_main_process:
        # a tag would name weights that timm offers, and these are others
        model_config = {"label_names": list(classes), "pretrained_cfg": {"tag": ""}}
        data_config = {"input_size": input_format.input_size}
        write_timm_files(out, run.averaged, model_config=model_config, data_config=data_config)
    accelerator.wait_for_everyone()
    published, scores = _evaluated(out, splits, accelerator)
    metrics = Metrics(
        model=config.model.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        data=source.name,
        data_revision=config.data.revision or None,
        **scores,
        train=Training(
            seconds=run.counters.seconds,
            cpu_seconds=run.counters.cpu_seconds,
            pflop=pflop,
            epochs=config.train.epochs,
            images_per_second=run.images_per_second(),
            n=len(splits["train"]),
        ),
        environment=environment(device) | {"processes": accelerator.num_processes},
    )
    if accelerator.is_main_process:
        images = next(iter(splits["test"].loader(IMAGES)))[0]
        record_maps(out, published, input_format_of(published).normalize(images).to(device))
        end_run(out, metrics)
        remove_checkpoints(out)
    accelerator.end_training()
    return metrics


def _evaluated(
    out: Path, splits: dict[str, Split], accelerator: Accelerator
) -> tuple[nn.Module, dict[str, Scores]]:
    """The model as the run folder gives it, and its scores in full precision, on the test split for the only time."""
    published, scores = load_model(str(out)).to(accelerator.device), {}
    for name in ("test", "validation"):
        if len(splits[name]):
            loader = accelerator.prepare(splits[name].loader(BATCH_SIZE))
            scores[name] = evaluate(
                published, loader, input_format_of(published), accelerator, name == "test"
            )
    return published, scores


def _accelerator(config: Config, out: Path) -> Accelerator:
    train = config.train
    if train.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("train.precision: got fp16, expected bf16 or no on a CPU")
    if train.tracker and find_spec(train.tracker) is None:
        raise ValueError(
            f"train.tracker: got {train.tracker}, which is not installed: pip install 'sa_zoo[tracking]'"
        )
    return open_accelerator(
        mixed_precision=train.precision,
        gradient_accumulation_steps=train.accumulation,
        log_with=train.tracker or None,
        project_dir=str(out) if train.tracker else None,
    )


def _pflop(model: nn.Module, config: Config, input_format: InputFormat, steps: int) -> float:
    """Work of a run of `steps` per epoch, as metrics.json defines it."""
    small, size = config.augment.small_epochs, config.augment.small_size
    if small and getattr(model, "pretrained_cfg", {}).get("fixed_input_size"):
        raise ValueError(
            f"augment.small_epochs: got {small}, expected 0: {config.model.name} takes one size of images"
        )
    whole = input_format.input_size
    try:
        macs = (config.train.epochs - small) * training_macs(model, whole)
        macs += small * training_macs(model, (whole[0], size, size)) if small else 0
    except AssertionError as error:
        small_images = f" and {size}x{size}, augment.small_size" if small else ""
        raise ValueError(
            f"data.image_size: got {whole[1]}x{whole[2]}{small_images}: {error}"
        ) from error
    return 3 * 2 * macs * steps * config.train.batch_size / 1e15


def _loop(run: Run, validation: Split, input_format: InputFormat) -> None:
    accelerator, train = run.accelerator, run.config.train
    loader = accelerator.prepare(validation.loader(train.batch_size))
    if train.tracker:
        # a tracker takes numbers and text only
        settings = flatten_dict(run.config.model_dump(), delimiter="/").items()
        accelerator.init_trackers(
            train.tracker, {k: str(v) if isinstance(v, list | dict) else v for k, v in settings}
        )
    with interruption() as run.signals, run.progress:
        if not run.images_done():
            run.save()  # to repeat the first steps from, should they overflow
        while run.counters.epoch < train.epochs:
            run.train_epoch()
            scores = None
            if len(validation):
                with accelerator.autocast():
                    scores = evaluate(run.averaged, loader, input_format, accelerator)
            record = run.end_epoch(scores)
            accelerator.log(
                flatten_dict(record, delimiter="/"), step=record["epoch"]
            )  # if there is a tracker
