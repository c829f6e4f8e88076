"""Trains any timm model on any labeled images, and leaves a run folder that timm loads.

What a run computes is a function of its config: one that was killed and resumed on a CPU ends with exactly the weights
of an uninterrupted one. Two processes follow the curve of one; only randomness inside the model (dropout) and what
depends on the micro-batch (mixup, batch norm) differ. The last incomplete batch of each epoch is dropped.
The last epoch is published and reported (its weight average if train.ema asks for one), never the best.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers.utils.generic import flatten_dict

from sa_zoo.cost import training_macs
from sa_zoo.folders.metrics import Metrics, Training, environment, write_metrics
from sa_zoo.folders.opened import Opened, open_model
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import Config, ModelConfig
from sa_zoo.training.device import open_accelerator, report_lost_process, with_launched_precision
from sa_zoo.training.evaluate import evaluate
from sa_zoo.training.loop import Run
from sa_zoo.training.model import (
    InputFormat,
    check_output,
    check_start,
    create_model,
    input_format_of,
)
from sa_zoo.training.progress import interruption
from sa_zoo.training.report import check_data
from sa_zoo.training.run_folder import (
    IMAGES,
    is_finished,
    record_maps,
    remove_checkpoints,
)
from sa_zoo.training.sources import Source, digest_of, open_source
from sa_zoo.training.splits import Split, kept_if_small, streamed_splits
from sa_zoo.training.whitening import whiten_first_convolution
from sa_zoo.vit.start import START_IMAGES, start_as_convolution


@report_lost_process()
def train(config: Config, out: Path, resume: bool = False) -> Opened:
    """Train, write the last epoch into `out`, open that folder and evaluate it; returns what was opened, and metrics.

    Raises Interrupted after Ctrl-C and FloatingPointError if the loss is not finite, both with a checkpoint to resume
    from; ConnectionError if a process of the run or of its loader has ended; FileExistsError, FileNotFoundError or
    ValueError if config, data or folder do not allow the run.
    """
    config = with_launched_precision(config)
    accelerator = _accelerator(config, out)
    if is_finished(out, config, resume):
        finished = open_model(str(out))
        if accelerator.is_main_process:
            remove_checkpoints(out)  # the run may have been killed before it did
        return finished
    check_start(config.model)  # before data are loaded, which may take long
    with accelerator.main_process_first():  # it downloads the data for all
        source = open_source(config.data)
    seed = config.train.seed
    torch.manual_seed(seed)
    device = accelerator.device
    classes = len(source.classes)
    model = create_model(config.model, classes, config.data.image_size)
    model = model.to(device).to(memory_format=torch.channels_last)
    input_format = input_format_of(model, config.data.image_size)
    macs = _macs(model, config, input_format)
    check_output(model, input_format.input_size, classes)
    data = config.data
    streamed = streamed_splits(source, data.validation, input_format, hold_out=data.hold_out)
    check_data(source, streamed, config.augment)
    splits = kept_if_small(streamed, device)
    _initialize(model, config.model, splits["train"], input_format)
    augment = Augment(config.augment, seed, classes, input_format.normalize)
    run = Run(config, out, accelerator, model, splits["train"], augment, digest_of(source))
    _loop(run, splits["validation"], input_format)
    if accelerator.is_main_process:
        # a tag would name weights that timm offers, and these are others
        labels = {"label_names": list(source.classes), "pretrained_cfg": {"tag": ""}}
        size = {"input_size": input_format.input_size}
        write_timm_files(out, run.averaged, model_config=labels, data_config=size)
    accelerator.wait_for_everyone()
    published = _evaluated(run, source, splits, macs)
    if accelerator.is_main_process:
        write_metrics(out, published.metrics)
        remove_checkpoints(out)
    accelerator.end_training()
    return published


def _initialize(
    model: nn.Module, config: ModelConfig, split: Split, input_format: InputFormat
) -> None:
    """Initial weights that depend on training images."""
    if config.whiten:
        whiten_first_convolution(model, split, input_format)
    if config.start:
        images, *_ = next(iter(split.loader(START_IMAGES)))
        start_as_convolution(model, images=input_format.normalize(images))


def _accelerator(config: Config, out: Path) -> Accelerator:
    train = config.train
    if train.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("train.precision: got fp16, expected bf16 or no on a CPU")
    if train.tracker and find_spec(train.tracker) is None:
        raise ValueError(
            f"train.tracker: got {train.tracker}, which is not installed: pip install {train.tracker}"
        )
    accelerator = open_accelerator(
        mixed_precision=train.precision,
        gradient_accumulation_steps=train.accumulation,
        log_with=train.tracker or None,
        project_dir=out,
    )
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "accelerate: got FSDP, which divides the network, expected DDP (configs/accelerate/ddp.yaml): "
            "checkpoints hold whole networks"
        )
    return accelerator


def _macs(model: nn.Module, config: Config, input_format: InputFormat) -> int:
    """Multiply-adds of the forward passes of one training image, over all epochs."""
    small, size = config.augment.small_epochs, config.augment.small_size
    channels, height, width = input_format.input_size
    passes = [(config.train.epochs - small, input_format.input_size)]
    if small:
        if getattr(model, "pretrained_cfg", {}).get("fixed_input_size"):
            raise ValueError(
                f"augment.small_epochs: got {small}, expected 0: {config.model.name} takes images "
                "of one size"
            )
        passes.append((small, (channels, size, size)))
    try:
        return sum(epochs * training_macs(model, input_size) for epochs, input_size in passes)
    except AssertionError as error:
        small_images = f" and {size}x{size}, augment.small_size" if small else ""
        raise ValueError(f"data.image_size: got {height}x{width}{small_images}: {error}") from error


def _loop(run: Run, validation: Split, input_format: InputFormat) -> None:
    accelerator = run.accelerator
    train = run.config.train
    batch = train.batch_size
    with interruption() as run.signals, run.progress:
        run.begin()
        if train.tracker:
            settings = flatten_dict(run.config.model_dump(), delimiter="/")
            # a tracker takes numbers and text only
            for key, value in settings.items():
                if isinstance(value, list | dict):
                    settings[key] = str(value)
            accelerator.init_trackers(train.tracker, settings)
        while run.counters.epoch < train.epochs:
            run.train_epoch()
            scores = None
            if len(validation):
                with accelerator.autocast():
                    scores = evaluate(run.averaged, validation, input_format, accelerator, batch)
            record = run.end_epoch(scores)
            # a tracker gets it, if there is one
            accelerator.log(flatten_dict(record, delimiter="/"), step=record["epoch"])


def _evaluated(run: Run, source: Source, splits: Mapping[str, Split], macs: int) -> Opened:
    """Open the run folder, and evaluate it in full precision, on the test split for the only time; record its maps."""
    config = run.config
    accelerator = run.accelerator
    published = open_model(str(run.out))
    network = published.network.to(accelerator.device)
    input_format = input_format_of(network)
    scores = {}
    for name in ("test", "validation"):
        split = splits[name]
        if len(split):
            detail = name == "test"
            scores[name] = evaluate(network, split, input_format, accelerator, detail=detail)
    if accelerator.is_main_process:
        images = next(iter(splits["test"].loader(IMAGES)))[0]
        record_maps(run.out, network, input_format.normalize(images).to(accelerator.device))
    network.cpu()
    metrics = Metrics(
        model=config.model.name,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        data=source.name,
        data_revision=config.data.revision or None,
        data_digest=run.digest["hash"],
        **scores,
        train=Training(
            seconds=run.counters.seconds,
            cpu_seconds=run.counters.cpu_seconds,
            pflop=3 * 2 * macs * run.images_per_epoch / 1e15,  # backward costs two forward passes
            epochs=config.train.epochs,
            images_per_second=run.images_per_second(),
            n=len(run.split),
        ),
        environment=environment(accelerator.device)
        | {"processes": accelerator.num_processes, "precision": config.train.precision},
    )
    return replace(published, metrics=metrics)
