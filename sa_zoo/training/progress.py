"""A progress bar on a terminal, one line per epoch elsewhere; and stopping at Ctrl-C or SIGTERM."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

from tqdm import tqdm


class Interrupted(Exception):
    """The run was asked to stop, and has saved a checkpoint to resume from."""


class Progress:
    """Images done, their rate and the time left; `update` after steps, `epoch` after each epoch."""

    def __init__(self, images: int, done: int, epochs: int, main: bool) -> None:
        terminal = sys.stderr.isatty()
        self.epochs, self.main, self.terminal = epochs, main, terminal
        self.bar = tqdm(total=images, initial=done, unit=" images", unit_scale=True, disable=not (main and terminal))

    def update(self, epoch: int, images: int, loss: float, accuracy: float) -> None:
        self.bar.set_description(f"epoch {epoch + 1}/{self.epochs}", refresh=False)
        self.bar.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.3f}", refresh=False)
        self.bar.update(images)

    def epoch(self, record: dict[str, Any], images_per_second: float) -> None:
        if not self.main:
            return
        seconds_left = record["seconds"] / record["epoch"] * (self.epochs - record["epoch"])
        held_out = f", validation {record['validation']['top1']:.4f}" if "validation" in record else ""
        line = (
            f"epoch {record['epoch']}/{self.epochs}: loss {record['loss']:.4f}, accuracy {record['top1']:.4f}"
            f"{held_out}, {images_per_second:.0f} images/s, {tqdm.format_interval(seconds_left)} left"
        )
        if self.terminal:
            self.bar.write(line)
        else:
            print(line, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()


class Interruption:
    """A context in which the first SIGINT or SIGTERM sets `requested`; a second SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self.before: dict[int, Any] = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self.before[number])

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
