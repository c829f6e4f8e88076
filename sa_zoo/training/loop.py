"""The training loop of a run: steps, checkpoints and the end of each epoch."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.utils import distribute_bn
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.utils.generic import flatten_dict

from sa_zoo.data.images import LabeledImages, changes
from sa_zoo.data.input_format import to_device
from sa_zoo.data.splits import Split, StreamedSplit
from sa_zoo.folders.metrics import Scores
from sa_zoo.folders.write import write_tensors
from sa_zoo.training.augment import ORDER, Augment, permutation, seed_step
from sa_zoo.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from sa_zoo.training.config import Config
from sa_zoo.training.evaluate import score
from sa_zoo.training.model import classifier_parameters, frozen_norms
from sa_zoo.training.optimization import learning_rate_factor
from sa_zoo.training.photographs import Photographs
from sa_zoo.training.progress import Interrupted, Progress, interruption
from sa_zoo.training.run_folder import (
    BEST,
    CHECKPOINTS,
    HEADS,
    best_epoch,
    record_heads,
    write_history,
)

READ_EVERY = 10  # steps between readings of the loss on a GPU; each reading waits for the GPU
Batch = tuple[Tensor, Tensor, Tensor]  # images (B, C, H, W), labels, indices (B,)


def check_batch_size(config: Config) -> None:
    """Raise ValueError unless every micro-batch of every process has the same number of images, even for mixup."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    train, augment = config.train, config.augment
    images, rest = divmod(train.batch_size, processes * train.accumulation)
    expected = ""
    if rest:
        expected = f"a multiple of {processes} processes x {train.accumulation} micro-batches"
    elif (augment.mixup or augment.cutmix) and images % 2:
        expected = f"an even number per micro-batch for mixup and cutmix, not {images}"
    if expected:
        raise ValueError(f"train.batch_size: got {train.batch_size}, expected {expected}")


@dataclass
class Run:
    """The state of a run: model, optimizer and counters, restored from the last checkpoint, and the data.

    Raises ValueError if train.batch_size does not fit, or if the last checkpoint is of a run on other data.
    """

    config: Config
    out: Path
    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer
    data: LabeledImages
    digest: dict[str, Any]  # of the data
    splits: Mapping[str, Split]

    def __post_init__(self) -> None:
        train = self.config.train
        self.split = self.splits["train"]
        self.batch_size = train.batch_size
        self.steps = len(self.split) // self.batch_size  # per epoch
        self.images_per_epoch = self.steps * self.batch_size
        self.images = train.epochs * self.images_per_epoch  # of the whole run
        classes = len(self.data.classes)
        normalize = self.split.input_format.normalize
        augment = self.config.augment
        self.augment = Augment(augment, train.seed, classes, normalize)
        if augment.scale:
            assert isinstance(self.split, StreamedSplit)
            self.split = Photographs(self.split, augment, train.seed)
        self.trainable = [each for each in self.model.parameters() if each.requires_grad]
        prepared = self.accelerator.prepare(self.model, self.optimizer)
        self.prepared, self.optimizer = prepared
        # sums since the last reading: loss, correct answers, requests to stop
        self.unread = torch.zeros(3, device=self.accelerator.device)
        self.folder = self.out / CHECKPOINTS
        self._restore()

    def _restore(self) -> None:
        """Return to the last checkpoint, if there is one."""
        self.counters = load_checkpoint(self.folder, self.model, self.optimizer)
        before, now = self.counters.data, self.digest
        if before != {key: now.get(key) for key in before}:
            raise ValueError(
                f"data: got {changes(before, now)}, expected those that the run in {self.out} "
                "began with, or a new --out"
            )
        self.counters.data = {**now}
        if isinstance(self.split, StreamedSplit) and not self.counters.epoch:
            del self.counters.data["hash"]  # an image that cannot be read may get another size
        if self.counters.scaler and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(self.counters.scaler)
        self.start = time.perf_counter() - self.counters.seconds
        self.cpu_start = time.process_time() - self.counters.cpu_seconds

    def save(self) -> None:
        """Write a checkpoint. Raises FloatingPointError unless weights are finite, even if the loss is."""
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise self._not_finite("weights: got some that are")
        self.counters.seconds = time.perf_counter() - self.start
        self.counters.cpu_seconds = time.process_time() - self.cpu_start
        if self.accelerator.scaler:
            self.counters.scaler = self.accelerator.scaler.state_dict()
        if self.accelerator.is_main_process:
            # HEADS needs positional parameters, BEST a finished epoch
            files = [path for path in (self.out / HEADS, self.out / BEST) if path.exists()]
            save_checkpoint(self.folder, self.model, self.optimizer, self.counters, files)
        self.accelerator.wait_for_everyone()

    @property
    def head_only(self) -> bool:
        """Whether this epoch trains the classifier alone."""
        return self.counters.epoch < self.config.train.head_epochs

    def begin_epoch(self) -> None:
        """Set which parameters are trained and which norms keep their statistics."""
        head = classifier_parameters(self.model) if self.head_only else set(self.trainable)
        for parameter in self.trainable:
            parameter.requires_grad_(parameter in head)
        self.prepared.train()
        for norm in frozen_norms(self.model, "." if self.head_only else self.config.model.freeze):
            norm.eval()
        self.split.epoch = self.counters.epoch

    def remaining_batches(self) -> Iterator[list[Batch]]:
        """For each remaining step of the epoch, the micro-batches of this process."""
        train = self.config.train
        order = permutation(len(self.split), ORDER, train.seed, self.counters.epoch)
        parts = (self.steps, train.accumulation, self.accelerator.num_processes, -1)
        order = order[: self.images_per_epoch].reshape(parts)
        mine = order[self.counters.step :, :, self.accelerator.process_index]
        batches = iter(self.split.loader(batch_sampler=mine.reshape(-1, mine.shape[-1])))
        for _ in mine:
            yield list(islice(batches, train.accumulation))

    def step(self, batches: list[Batch]) -> None:
        """One optimizer step over micro-batches: augment, forward, backward, clip, update."""
        accelerator, counters = self.accelerator, self.counters
        optim = self.config.optim
        # the classifier and then everything: each has a schedule of its own
        begin, end = 0, self.config.train.head_epochs * self.images_per_epoch
        if not self.head_only:
            begin, end = end, self.images
        seen = self.images_done - begin
        factor = learning_rate_factor(seen, self.batch_size, end - begin, optim)
        for group in self.optimizer.param_groups:
            group["lr"] = optim.lr * factor * group.get("lr_scale", 1.0)
        seed_step(self.config.train.seed, self.steps_done, accelerator.process_index)
        for images, labels, indices in batches:
            images = to_device(torch.as_tensor(images), accelerator.device)
            labels = to_device(torch.as_tensor(labels), accelerator.device)
            inputs, targets = self.augment(images, labels, torch.as_tensor(indices), counters.epoch)
            with accelerator.accumulate(self.prepared):
                logits = self._logits(inputs)
                smoothing = self.augment.label_smoothing
                loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
                accelerator.backward(loss)
                if accelerator.sync_gradients and optim.clip:
                    accelerator.clip_grad_norm_(self.model.parameters(), optim.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.unread[0] += loss.detach() * len(labels)
            self.unread[1] += (logits.argmax(1) == labels).sum()
        counters.step += 1

    def _logits(self, inputs: Tensor) -> Tensor:
        try:
            return self.prepared(inputs)
        except ValueError as error:
            if len(inputs) > 1:
                raise
            raise ValueError(  # of batch normalization
                f"train.batch_size: got {self.batch_size}, in micro-batches of one image: {error}"
            ) from error

    def read(self, stop: bool) -> bool:
        """Sum loss and accuracy over processes; return whether any process was asked to stop."""
        self.unread[2] += stop
        loss, correct, requests = self.accelerator.reduce(self.unread).tolist()
        self.unread.zero_()
        if not math.isfinite(loss):
            raise self._not_finite(f"train loss: got {loss}, which is")
        self.counters.loss_sum += loss
        self.counters.correct += correct
        return bool(requests)

    def _not_finite(self, what: str) -> FloatingPointError:
        where = f"epoch {self.counters.epoch + 1}, step {self.counters.step}"
        kept = [f"{path} is the last good checkpoint" for path in checkpoints(self.folder)[:1]]
        advice = ". ".join([*kept, "Lower optim.lr or set optim.clip"])
        return FloatingPointError(f"{what} not finite, in {where}; {advice}")

    def end_epoch(self, validation: Scores | None) -> dict[str, Any]:
        """Add the epoch to the history and the head positions to their record; return the line of the history."""
        counters = self.counters
        loss, top1 = self.means
        record = {
            "epoch": counters.epoch + 1,
            "loss": loss,
            "top1": top1,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
        }
        if validation:
            record["validation"] = validation.model_dump(exclude_none=True)
        record["seconds"] = time.perf_counter() - self.start
        counters.history.append(record)
        counters.epoch += 1
        counters.step = 0
        counters.data = self.digest
        counters.loss_sum = counters.correct = 0.0
        if self.accelerator.is_main_process:
            write_history(self.out, counters.history)
            record_heads(self.out, self.model, counters.epoch)
            if self.config.train.keep == "best" and best_epoch(counters.history) == counters.epoch:
                write_tensors(self.out / BEST, self.model.state_dict())
        return record

    @property
    def means(self) -> tuple[float, float]:
        """Loss and accuracy over the images of the epoch so far."""
        seen = self.counters.step * self.batch_size
        return self.counters.loss_sum / seen, self.counters.correct / seen

    @property
    def images_per_second(self) -> float:
        """Over the training steps of the whole run so far."""
        return self.images_done / max(self.counters.step_seconds, 1e-9)

    @property
    def images_done(self) -> int:
        return self.steps_done * self.batch_size

    @property
    def steps_done(self) -> int:
        return self.counters.epoch * self.steps + self.counters.step


def train_epochs(run: Run) -> None:
    """Take the remaining steps of a run. Raises Interrupted after a signal, FloatingPointError for NaN or infinity."""
    accelerator, config, counters = run.accelerator, run.config, run.counters
    train = config.train
    validation = run.splits["validation"]
    read_every = 1 if accelerator.device.type == "cpu" else READ_EVERY
    save_every = train.checkpoint_steps or run.steps
    if accelerator.is_main_process and not run.steps_done:
        record_heads(run.out, run.model, epoch=0)
    _start_tracker(accelerator, config)
    with (
        interruption() as signals,
        Progress(run.images, run.images_done, train.epochs, accelerator.is_main_process) as bar,
    ):
        while counters.epoch < train.epochs:
            run.begin_epoch()
            clock = time.perf_counter()
            # a loader draws a random number when it starts, so batches are read before `step` seeds
            for batches in run.remaining_batches():
                run.step(batches)
                last = counters.step == run.steps  # after it, the epoch is validated first
                save = run.steps_done % save_every == 0 and not last
                stop = False
                if save or last or counters.step % read_every == 0:
                    stop = run.read(bool(signals))
                    bar.show(counters.epoch, run.images_done, *run.means)
                    counters.step_seconds += time.perf_counter() - clock
                    clock = time.perf_counter()
                if save or stop:
                    run.save()
                    clock = time.perf_counter()
                if stop:
                    where = f"epoch {counters.epoch + 1} after step {counters.step} of {run.steps}"
                    raise Interrupted(f"stopped in {where}, and saved in {run.folder}")
            if accelerator.num_processes > 1:  # each has its own statistics of batch norm
                distribute_bn(run.model, accelerator.num_processes, reduce=True)
            scores = None
            if len(validation):
                with accelerator.autocast():
                    scores = score(run.model, validation, accelerator, run.batch_size)
            if not counters.epoch:  # test images that cannot be read are found now, not at the end
                for _ in accelerator.prepare(run.splits["test"].loader(batch_size=run.batch_size)):
                    pass
            record = run.end_epoch(scores)
            if run.steps_done % save_every == 0 or counters.epoch == train.epochs:
                run.save()
            bar.end_epoch(record, run.images_done, run.images_per_second)
            accelerator.log(flatten_dict(record, delimiter="/"), step=record["epoch"])


def _start_tracker(accelerator: Accelerator, config: Config) -> None:
    if config.train.tracker:
        settings = flatten_dict(config.model_dump(), delimiter="/")
        # a tracker takes numbers and text only
        texts = {key: str(each) for key, each in settings.items() if isinstance(each, list | dict)}
        accelerator.init_trackers(config.train.tracker, settings | texts)
