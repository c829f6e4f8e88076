"""The inner loop of a run: steps, weight average, saving and restoring."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from pydantic import TypeAdapter
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor, nn

from sa_zoo.folders.metrics import Scores
from sa_zoo.training.augment import ORDER, Augment, permutation, seed_step
from sa_zoo.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from sa_zoo.training.config import Config
from sa_zoo.training.device import to_device
from sa_zoo.training.optimization import learning_rate_factor, optimizer_of
from sa_zoo.training.overflow import watch
from sa_zoo.training.progress import Interrupted, Progress
from sa_zoo.training.run_folder import CHECKPOINTS, HEADS, record_heads, write_history
from sa_zoo.training.splits import Split

READ_EVERY = 10  # steps between readings of the loss on a GPU, which has to wait for each


@dataclass
class Counters:
    """Progress of a run: with weights and optimizer state, all that a resumed run needs."""

    epoch: int = 0
    step: int = 0  # in the epoch
    loss_sum: float = 0.0  # over the images of the epoch so far
    correct: float = 0.0  # of these images
    step_seconds: float = 0.0  # in training steps, over the run
    seconds: float = 0.0  # with validation and saving, over the run
    cpu_seconds: float = 0.0  # of all threads of this process in that time
    history: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] = field(default_factory=dict)  # of the loss, with fp16


class Run:
    """A model in training: everything from the first step of an epoch to the checkpoint after its last."""

    def __init__(
        self,
        config: Config,
        out: Path,
        accelerator: Accelerator,
        model: nn.Module,
        split: Split,
        augment: Augment,
    ) -> None:
        self.config, self.out, self.folder = config, out, out / CHECKPOINTS
        self.accelerator, self.model, self.split, self.augment = accelerator, model, split, augment
        train, parts = config.train, (accelerator.num_processes, config.train.accumulation)
        self.micro_batch, rest = divmod(
            train.batch_size, math.prod(parts)
        )  # images that one process evaluates at once
        self.steps = len(split) // train.batch_size
        got = f"train.batch_size: got {train.batch_size}"
        if rest:
            raise ValueError(
                f"{got}, expected a multiple of {parts[0]} processes x {parts[1]} micro-batches"
            )
        if not self.steps:
            raise ValueError(f"{got}, expected at most the {len(split)} to train on")
        if augment.mixup and self.micro_batch % 2:
            raise ValueError(
                f"{got}, which is {self.micro_batch} images per micro-batch, expected an even number"
            )
        self.total = train.epochs * self.steps * train.batch_size
        self.ema = ModelEmaV3(model, decay=train.ema, use_warmup=True) if train.ema else None
        self.averaged = self.ema.module if self.ema else model  # what is evaluated and published
        self.modules = {"model": model} | ({"ema": self.averaged} if self.ema else {})
        self.optimizer = accelerator.prepare(optimizer_of(model, config.optim))
        self.prepared = accelerator.prepare(model)
        self.unread = torch.zeros(
            3, device=accelerator.device
        )  # loss sum, correct, requests to stop
        self.clock = time.perf_counter(), time.process_time()
        self._restore()
        self.signals: list[int] = []  # received, which stop the run after the current step
        self.progress = Progress(
            self.total, self.images_done(), train.epochs, accelerator.is_main_process
        )

    def _restore(self) -> None:
        """Return to the last checkpoint, if there is one."""
        read = TypeAdapter(Counters).validate_python
        self.counters = load_checkpoint(self.folder, self.modules, self.optimizer, read)
        if self.counters.scaler and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(self.counters.scaler)

    def save(self) -> None:
        """Write a checkpoint, of finite weights only: a finite loss may have a gradient that is not."""
        self._tick()
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise self._not_finite("weights: got some that are")
        counters, scaler = self.counters, self.accelerator.scaler
        counters.scaler = scaler.state_dict() if scaler else {}
        if self.accelerator.is_main_process:
            record = self.out / HEADS
            files = [record] if record.is_file() else []
            save_checkpoint(self.folder, self.modules, self.optimizer, asdict(counters), files)
        self.accelerator.wait_for_everyone()

    def train_epoch(self) -> None:
        """Take the remaining steps of the current epoch."""
        self.prepared.train()
        counters, every = self.counters, self.config.train.checkpoint_steps
        read_every = 1 if self.accelerator.device.type == "cpu" else READ_EVERY
        self._tick()
        for _ in self._steps():
            counters.step += 1
            last = counters.step == self.steps  # after it the epoch is validated and saved anyway
            due = every and self._steps_done() % every == 0 and not last
            if due or last or counters.step % read_every == 0:
                self._read()
            if due:
                self.save()
        if self.accelerator.num_processes > 1:  # each process has its own statistics of batch norm
            for module in self.modules.values():
                distribute_bn(module, self.accelerator.num_processes, reduce=True)

    def _steps(self) -> Iterator[None]:
        """Take one optimizer step between two yields."""
        accelerator, train, optim, first = (
            self.accelerator,
            self.config.train,
            self.config.optim,
            True,
        )
        for images, labels, indices in self.split.loader_in_order(self._batches()):
            if first:
                factor = learning_rate_factor(
                    self.images_done(), train.batch_size, self.total, optim.warmup
                )
                for group in self.optimizer.param_groups:
                    group["lr"] = optim.lr * factor * group.get("lr_scale", 1.0)
                seed_step(train.seed, self._steps_done(), accelerator.process_index)
            with accelerator.accumulate(self.prepared):
                self._backward(
                    to_device(images, accelerator.device),
                    to_device(labels, accelerator.device),
                    indices,
                )
                if accelerator.sync_gradients and optim.clip:
                    accelerator.clip_grad_norm_(self.model.parameters(), optim.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if first := accelerator.sync_gradients:
                if self.ema:
                    self.ema.update(self.model, step=self._steps_done() + 1)
                yield

    def _batches(self) -> np.ndarray:
        """Indices of the images in each remaining micro-batch of this process (micro-batches, images)."""
        train, counters = self.config.train, self.counters
        order = permutation(len(self.split), ORDER, train.seed, counters.epoch)[
            : self.steps * train.batch_size
        ]
        parts = order.reshape(
            self.steps, train.accumulation, self.accelerator.num_processes, self.micro_batch
        )
        return parts[counters.step :, :, self.accelerator.process_index].reshape(
            -1, self.micro_batch
        )

    def _backward(self, images: Tensor, labels: Tensor, indices: Tensor) -> None:
        inputs, targets = self.augment(images, labels, indices, self.counters.epoch)
        logits = self.prepared(inputs)
        # mixup smooths its targets itself
        smoothing = 0.0 if self.augment.mixup else self.config.augment.label_smoothing
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        self.accelerator.backward(loss)
        self.unread[0] += loss.detach() * len(labels)
        self.unread[1] += (logits.argmax(1) == labels).sum()

    def _read(self) -> None:
        """Sum loss and accuracy over processes; stop the run if that was requested or the loss is not finite."""
        counters, seen = self.counters, self.counters.step * self.config.train.batch_size
        self.unread[2] += bool(self.signals)
        loss, correct, stop = self.accelerator.reduce(self.unread).tolist()
        self.unread.zero_()
        if not math.isfinite(loss):
            raise self._not_finite(f"train loss: got {loss}, which is")
        counters.loss_sum += loss
        counters.correct += correct
        counters.step_seconds += self._tick()
        self.progress.show(
            counters.epoch, self.images_done(), counters.loss_sum / seen, counters.correct / seen
        )
        if stop:
            self.save()
            where = f"epoch {counters.epoch + 1} after step {counters.step} of {self.steps}"
            raise Interrupted(f"stopped in {where}, and saved in {self.folder}")

    def _not_finite(self, what: str) -> FloatingPointError:
        """The error for it, with its cause: the steps since the last checkpoint are repeated to find it."""
        where, kept = (
            f"epoch {self.counters.epoch + 1}, step {self.counters.step}",
            checkpoints(self.folder),
        )
        error = f"{what} not finite, in {where}; "
        if not kept:
            return FloatingPointError(f"{error}the initial ones already")
        found = watch(self.model)
        self._restore()
        self.prepared.train()
        for _ in self._steps():
            self.counters.step += 1
            if causes := gather_object(found[:1]):
                error += f"first in {causes[0]}, step {self.counters.step}; "
                break
        return FloatingPointError(
            f"{error}{kept[0]} is the last good checkpoint. Lower optim.lr or set optim.clip"
        )

    def end_epoch(self, validation: Scores | None) -> dict[str, Any]:
        """Add the epoch to the history and save a checkpoint; returns its line of the history."""
        counters, images = self.counters, self.steps * self.config.train.batch_size
        self._tick()
        record = {
            "epoch": counters.epoch + 1,
            "loss": counters.loss_sum / images,
            "top1": counters.correct / images,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            **({"validation": validation.model_dump(exclude_none=True)} if validation else {}),
            "seconds": counters.seconds,
        }
        counters.history.append(record)
        counters.epoch += 1
        counters.step, counters.loss_sum, counters.correct = 0, 0.0, 0.0
        if self.accelerator.is_main_process:
            write_history(self.out, counters.history)
            record_heads(self.out, self.averaged, counters.epoch)
        self.save()
        self.progress.end_epoch(record, self.images_done(), self.images_per_second())
        return record

    def images_per_second(self) -> float:
        """Over the training steps of the whole run so far."""
        return self.images_done() / max(self.counters.step_seconds, 1e-9)

    def images_done(self) -> int:
        return self._steps_done() * self.config.train.batch_size

    def _steps_done(self) -> int:
        return self.counters.epoch * self.steps + self.counters.step

    def _tick(self) -> float:
        """Add the time since the last call to the run's, and return it."""
        before, self.clock = self.clock, (time.perf_counter(), time.process_time())
        passed, cpu_passed = (new - old for new, old in zip(self.clock, before, strict=True))
        self.counters.seconds += passed
        self.counters.cpu_seconds += cpu_passed
        return passed
