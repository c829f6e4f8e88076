"""Trains any timm model on any labeled images, and leaves a run folder that timm loads.

The result is a function of the config: on a CPU, a run that was killed and resumed ends with exactly the weights of an
uninterrupted run. Two processes follow the curve of one; only dropout and operations on a micro-batch (mixup, batch
norm) differ. The last incomplete batch of each epoch is dropped. The last epoch is published and reported or, with
train.keep = "best", the best one on the validation images. Test images choose nothing.

Read `train` below first, then its parts in the order of their calls. A step is `Run.step` in loop.py; run_folder.py
lists the files of a run.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sa_zoo.cost import cost_of_softness
from sa_zoo.data.hold_out import Rows, drawn_for, largest_draws, rows_of
from sa_zoo.data.images import LabeledImages, UnreadableImage, changes, digest_of
from sa_zoo.data.open_images import folder_of, open_images
from sa_zoo.data.progress import is_main_process, say
from sa_zoo.data.shared import shared
from sa_zoo.data.splits import fits, splits_of
from sa_zoo.folders.metrics import Metrics, Training, write_metrics
from sa_zoo.folders.write import write_timm_files
from sa_zoo.opened import Opened, base_model_of, open_model
from sa_zoo.training.config import Config, ModelConfig
from sa_zoo.training.device import (
    accelerator_of,
    check_machine,
    join_processes,
    launched,
    process_as_found,
    report_lost_process,
)
from sa_zoo.training.environment import environment
from sa_zoo.training.evaluate import score
from sa_zoo.training.loop import Run, check_batch_size, train_epochs
from sa_zoo.training.model import check_start, prepare_model
from sa_zoo.training.optimization import check_optimizer, fast_muon, optimizer_of
from sa_zoo.training.photographs import check_policy
from sa_zoo.training.run_folder import (
    BEST,
    MAPPED_IMAGES,
    MAY_CHANGE,
    START,
    begin_run,
    best_epoch,
    check_writable,
    is_finished,
    record_maps,
    remove_checkpoints,
)
from sa_zoo.training.whitening import whiten_first_convolution


@process_as_found()
@report_lost_process()
def train(config: Config, out: Path, resume: bool = False) -> Opened:
    """Train, write the epoch to keep into `out`, open and evaluate the folder; returns it opened, with its metrics.

    Raises Interrupted after Ctrl-C and FloatingPointError if the loss is not finite, both with a checkpoint to resume
    from; ConnectionError if a process of the run or of its loader has ended; FileExistsError, FileNotFoundError or
    ValueError if config, data or folder do not allow the run.
    """
    join_processes()
    own = config.data.model_dump(include=MAY_CHANGE["data"])
    config = shared(partial(launched, config))
    config = config.model_copy(update={"data": config.data.model_copy(update=own)})
    begun = shared(partial(_begin, config, out, resume))
    if isinstance(begun, Opened):
        return begun
    accelerator = accelerator_of(config, out)
    data = shared(partial(open_images, config.data), per_machine=True)
    torch.manual_seed(config.train.seed)
    model, input_format, macs = prepare_model(
        config.model_copy(update={"model": begun}), len(data.classes), accelerator.device
    )
    base_model = ""
    if is_main_process():
        if begun.init:
            base_model = base_model_of(begun.init, model)
        soft = cost_of_softness(model, input_format.input_size)
        if soft:
            say(soft)
    optimizer = optimizer_of(model, config.optim)
    kept = fits(sum(map(len, data.labels.values())), input_format)
    data = drawn_for(data, kept or config.data.hash_content)
    rows, digest = _rows_and_digest(data, config.data.validation)
    images = len(rows["train"][1])
    if config.train.batch_size > images:
        raise ValueError(
            f"train.batch_size: got {config.train.batch_size}, expected at most the {images} to train on"
        )
    if config.train.keep == "best" and not len(rows["validation"][1]):
        raise ValueError(
            "train.keep: got best without validation images, expected such a split, or data.validation above 0"
        )
    changed = config.augment.model_dump(exclude_defaults=True) or "nothing"
    text = f"; training images: {changed} (augment)"
    decoded_anew = {"train"} if config.augment.scale else set()
    splits = splits_of(
        data, rows, input_format, accelerator.device, config.data.workers, text, decoded_anew
    )
    if config.model.whiten:
        whiten_first_convolution(model, splits["train"])
    with begin_run(out, config, model, base_model) if is_main_process() else nullcontext():
        run = Run(config, out, accelerator, model, optimizer, data, digest, splits)
        try:
            with fast_muon():
                train_epochs(run)
        except UnreadableImage as error:
            if accelerator.num_processes == 1:  # others do not stop at the same step
                run.read(stop=False)
                run.save()
            # frames of the traceback would keep workers alive, and with them the lock of the folder
            cause = error.with_traceback(None)
            raise ValueError(f"{error}; replace the image, then --resume") from cause
        return _publish(run, macs, rows, base_model)


def _begin(config: Config, out: Path, resume: bool) -> Opened | ModelConfig:
    """The finished run in the folder, or the initial model of a run to start or resume.

    Raises ValueError with everything that can be checked before loading data, which may take long.
    """
    if is_finished(out, config, resume):
        remove_checkpoints(out)  # the run may have been killed before this
        return open_model(out)
    start = config.model
    if (out / START).is_dir():  # model.init may be gone when a run resumes
        start = start.model_copy(update={"init": str(out / START)})
    check_all(
        partial(check_machine, config),
        partial(check_start, start),
        partial(check_optimizer, config.optim.name),
        partial(check_batch_size, config),
        partial(check_policy, config.augment.auto_augment),
        partial(check_writable, out),
        partial(folder_of, config.data),
    )
    return start


def _rows_and_digest(data: LabeledImages, validation: float) -> tuple[Rows, dict[str, Any]]:
    """Computed in one process of each machine. Raises ValueError if the data are others than on the first machine."""
    rows, digest = shared(lambda: (rows_of(data, validation), digest_of(data)), per_machine=True)
    expected = shared(lambda: digest)
    if digest != expected:
        raise ValueError(
            f"data: got {changes(expected, digest)} on this machine, expected those of the first"
        )
    return rows, digest


def check_all(*checks: Callable[[], object]) -> None:
    """Raise the error of the only check that fails, or ValueError with all errors."""
    errors: list[Exception] = []
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ValueError("\n".join(map(str, errors)))


def _publish(run: Run, macs: int, rows: Rows, base_model: str) -> Opened:
    """Write the model and score the folder in full precision: the only scores on the test split.

    `macs`: multiply-adds of one training image over all epochs.
    """
    config, accelerator, out = run.config, run.accelerator, run.out
    best = config.train.keep == "best"
    if accelerator.is_main_process:
        if best:
            run.model.load_state_dict(load_file(out / BEST))
        write_timm_files(
            out,
            run.model,
            # a tag would name weights of timm; these are new
            model_config={"label_names": list(run.data.classes), "pretrained_cfg": {"tag": ""}},
            data_config={"input_size": run.split.input_format.input_size},
        )
    published = shared(partial(open_model, out))  # all score what is published
    network = published.network.to(accelerator.device)
    scores = {}
    for name in ("test", "validation"):
        split = run.splits[name]
        if len(split):
            scores[name] = score(network, split, accelerator, detail=name == "test")
    cpu_seconds = torch.tensor(run.counters.cpu_seconds, device=accelerator.device)
    metrics = Metrics(
        model=config.model.name,
        base_model=base_model or None,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        data=run.data.name,
        data_revision=config.data.revision or None,
        data_digest=run.digest["hash"],
        **scores,
        train=Training(
            seconds=run.counters.seconds,
            cpu_seconds=accelerator.reduce(cpu_seconds).item(),
            pflop=2 * macs * run.images_per_epoch / 1e15,
            epochs=config.train.epochs,
            kept_epoch=best_epoch(run.counters.history) if best else None,
            images_per_second=run.images_per_second,
            n=len(run.split),
        ),
        environment=environment(accelerator.device)
        | {"processes": accelerator.num_processes, "precision": config.train.precision},
    )
    if accelerator.is_main_process:
        if "test" not in run.data.labels:
            held_out = largest_draws(run.data, rows["test"][1])
            metrics = metrics.model_copy(update={"held_out": held_out})
        images = run.splits["test"].first(MAPPED_IMAGES)
        record_maps(out, network, images.to(accelerator.device))
        write_metrics(out, metrics)
        remove_checkpoints(out)
    accelerator.end_training()
    return replace(published, network=network.cpu(), metrics=metrics)
