"""The inner loop of a run: steps, weight average, saving and restoring."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor, nn

from sa_zoo.folders.metrics import Scores
from sa_zoo.training.augment import ORDER, Augment, permutation, seed_step
from sa_zoo.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from sa_zoo.training.config import Config
from sa_zoo.training.device import to_device
from sa_zoo.training.model import frozen_norms
from sa_zoo.training.optimization import learning_rate_factor, optimizer_of
from sa_zoo.training.progress import Interrupted, Progress
from sa_zoo.training.run_folder import CHECKPOINTS, HEADS, begin_run, record_heads, write_history
from sa_zoo.training.sources import changes
from sa_zoo.training.splits import Split

READ_EVERY = 10  # steps between readings of the loss on a GPU, which has to wait for each
Batch = tuple[Tensor, Tensor, Tensor]  # images (B, C, H, W), labels, indices (B,)


@dataclass
class Run:
    """A model in training: everything from the first step of an epoch to the checkpoint after its last."""

    config: Config
    out: Path
    accelerator: Accelerator
    model: nn.Module
    split: Split
    augment: Augment
    digest: dict[str, Any]

    def __post_init__(self) -> None:
        train = self.config.train
        self.micro_batch = self._images_at_once()
        self.steps = len(self.split) // train.batch_size  # per epoch
        self.images_per_epoch = self.steps * train.batch_size
        self.images = train.epochs * self.images_per_epoch  # of the whole run
        self.ema = None
        self.averaged = self.model  # what is evaluated and published
        self.modules = {"model": self.model}
        if train.ema:
            self.ema = ModelEmaV3(self.model, decay=train.ema, use_warmup=True)
            self.averaged = self.modules["ema"] = self.ema.module
        optimizer = optimizer_of(self.model, self.config.optim)
        self.prepared, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        # sums since the last reading: loss, correct answers, requests to stop
        self.unread = torch.zeros(3, device=self.accelerator.device)
        self.folder = self.out / CHECKPOINTS
        self._restore()
        self.start = time.perf_counter() - self.counters.seconds
        self.cpu_start = time.process_time() - self.counters.cpu_seconds
        self.signals: list[int] = []  # received, which stop the run after the current step
        main = self.accelerator.is_main_process
        self.progress = Progress(self.images, self.images_done(), train.epochs, main)

    def _images_at_once(self) -> int:
        """Images of a micro-batch. Raises ValueError if train.batch_size does not fit processes or data."""
        train = self.config.train
        processes = self.accelerator.num_processes
        images, rest = divmod(train.batch_size, processes * train.accumulation)
        expected = ""
        if rest:
            expected = f"a multiple of {processes} processes x {train.accumulation} micro-batches"
        elif train.batch_size > len(self.split):
            expected = f"at most the {len(self.split)} to train on"
        elif self.augment.mixup and images % 2:
            expected = f"an even number per micro-batch for mixup and cutmix, not {images}"
        if expected:
            raise ValueError(f"train.batch_size: got {train.batch_size}, expected {expected}")
        return images

    def begin(self) -> None:
        """Make the run folder, unless the run was begun before."""
        if self.accelerator.is_main_process:
            begin_run(self.out, self.config)
            if not self.images_done():
                record_heads(self.out, self.averaged, epoch=0)

    def train_epoch(self) -> None:
        """Take the remaining steps of the current epoch."""
        counters = self.counters
        read_every = 1 if self.accelerator.device.type == "cpu" else READ_EVERY
        self.prepared.train()
        for norm in frozen_norms(self.model, self.config.model.freeze):
            norm.eval()
        start = time.perf_counter()
        batches = self._remaining_batches()
        while counters.step < self.steps:
            # read before the step seeds its random numbers, as a loader draws one when it starts
            self.step(list(islice(batches, self.config.train.accumulation)))
            last = counters.step == self.steps  # after it, the epoch is validated first
            save = self._saves_now() and not last
            stop = False
            if save or last or counters.step % read_every == 0:
                stop = self._read()
                counters.step_seconds += time.perf_counter() - start
                start = time.perf_counter()
            if save or stop:
                self.save()
                start = time.perf_counter()
            if stop:
                where = f"epoch {counters.epoch + 1} after step {counters.step} of {self.steps}"
                raise Interrupted(f"stopped in {where}, and saved in {self.folder}")
        if self.accelerator.num_processes > 1:  # each process has its own statistics of batch norm
            for module in self.modules.values():
                distribute_bn(module, self.accelerator.num_processes, reduce=True)

    def _remaining_batches(self) -> Iterator[Batch]:
        """The micro-batches of this process for the remaining steps of the epoch."""
        train = self.config.train
        order = permutation(len(self.split), ORDER, train.seed, self.counters.epoch)
        parts = (self.steps, train.accumulation, self.accelerator.num_processes, self.micro_batch)
        order = order[: self.images_per_epoch].reshape(parts)
        mine = order[self.counters.step :, :, self.accelerator.process_index]
        return iter(self.split.loader_in_order(mine.reshape(-1, self.micro_batch)))

    def step(self, batches: list[Batch]) -> None:
        """One optimizer step: load, augment, forward, backward, update, record."""
        accelerator = self.accelerator
        self._set_learning_rate()
        seed_step(self.config.train.seed, self.steps_done(), accelerator.process_index)
        # mixup smooths its targets itself
        smoothing = 0.0 if self.augment.mixup else self.config.augment.label_smoothing
        for images, labels, indices in batches:
            images = to_device(images, accelerator.device)
            labels = to_device(labels, accelerator.device)
            inputs, targets = self.augment(images, labels, indices, self.counters.epoch)
            with accelerator.accumulate(self.prepared):
                logits = self.prepared(inputs)
                loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.config.optim.clip:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.unread[0] += loss.detach() * len(labels)
            self.unread[1] += (logits.argmax(1) == labels).sum()
        if self.ema:
            self.ema.update(self.model, step=self.steps_done() + 1)
        self.counters.step += 1

    def _set_learning_rate(self) -> None:
        batch, optim = self.config.train.batch_size, self.config.optim
        factor = learning_rate_factor(self.images_done(), batch, self.images, optim.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = optim.lr * factor * group.get("lr_scale", 1.0)

    def _read(self) -> bool:
        """Sum loss and accuracy over processes; returns whether one of them was asked to stop.

        Raises FloatingPointError if the loss is not finite.
        """
        counters = self.counters
        self.unread[2] += bool(self.signals)
        loss, correct, stop = self.accelerator.reduce(self.unread).tolist()
        self.unread.zero_()
        if not math.isfinite(loss):
            raise self._not_finite(f"train loss: got {loss}, which is")
        counters.loss_sum += loss
        counters.correct += correct
        seen = counters.step * self.config.train.batch_size
        means = counters.loss_sum / seen, counters.correct / seen
        self.progress.show(counters.epoch, self.images_done(), *means)
        return bool(stop)

    def _not_finite(self, what: str) -> FloatingPointError:
        where = f"epoch {self.counters.epoch + 1}, step {self.counters.step}"
        kept = [f"{path} is the last good checkpoint" for path in checkpoints(self.folder)[:1]]
        advice = ". ".join([*kept, "Lower optim.lr or set optim.clip"])
        return FloatingPointError(f"{what} not finite, in {where}; {advice}")

    def _saves_now(self) -> bool:
        """Whether a checkpoint follows the steps done so far: at the intervals of the config, and after the last."""
        interval = self.config.train.checkpoint_steps or self.steps
        done = self.steps_done()
        return done % interval == 0 or done == self.config.train.epochs * self.steps

    def end_epoch(self, validation: Scores | None) -> dict[str, Any]:
        """Add the epoch to the history; returns its line of the history."""
        counters = self.counters
        record = {
            "epoch": counters.epoch + 1,
            "loss": counters.loss_sum / self.images_per_epoch,
            "top1": counters.correct / self.images_per_epoch,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
        }
        if validation:
            record["validation"] = validation.model_dump(exclude_none=True)
        record["seconds"] = time.perf_counter() - self.start
        counters.history.append(record)
        counters.epoch += 1
        counters.step = 0
        counters.loss_sum = counters.correct = 0.0
        if self.accelerator.is_main_process:
            write_history(self.out, counters.history)
            record_heads(self.out, self.averaged, counters.epoch)
        if self._saves_now():
            self.save()
        self.progress.end_epoch(record, self.images_done(), self.images_per_second())
        return record

    def save(self) -> None:
        """Write a checkpoint, of finite weights only: a finite loss may have a gradient that is not."""
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise self._not_finite("weights: got some that are")
        self.counters.seconds = time.perf_counter() - self.start
        self.counters.cpu_seconds = time.process_time() - self.cpu_start
        if self.accelerator.scaler:
            self.counters.scaler = self.accelerator.scaler.state_dict()
        if self.accelerator.is_main_process:
            heads = self.out.glob(HEADS)  # none for a model without positional parameters
            save_checkpoint(self.folder, self.modules, self.optimizer, self.counters, heads)
        self.accelerator.wait_for_everyone()

    def _restore(self) -> None:
        """Return to the last checkpoint, if there is one. Raises ValueError if it is that of a run on other data."""
        self.counters = load_checkpoint(self.folder, self.modules, self.optimizer)
        before = self.counters.data
        if before and before != self.digest:
            found = changes(before, self.digest)
            raise ValueError(
                f"data: got {found}, expected those that the run in {self.out} began with, or a new --out"
            )
        self.counters.data = self.digest
        if self.counters.scaler and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(self.counters.scaler)

    def images_per_second(self) -> float:
        """Over the training steps of the whole run so far."""
        return self.images_done() / max(self.counters.step_seconds, 1e-9)

    def images_done(self) -> int:
        return self.steps_done() * self.config.train.batch_size

    def steps_done(self) -> int:
        return self.counters.epoch * self.steps + self.counters.step
