"""A progress bar on a terminal, elsewhere one line per epoch; and a clean stop at a signal."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from sa_zoo.data.progress import on_terminal
from sa_zoo.data.splits import STOPS


class Interrupted(Exception):
    """The run received a signal to stop and saved a checkpoint."""


class Progress(tqdm):  # type: ignore[type-arg]  # no argument at run time
    """Images done, their rate and the time left: `show` after steps, `end_epoch` after each epoch."""

    def __init__(self, images: int, done: int, epochs: int, main: bool) -> None:
        bar = on_terminal()
        super().__init__(
            total=images, initial=done, unit=" images", unit_scale=True, disable=not bar
        )
        self.images = images
        self.epochs = epochs
        self.main = main
        # of this process: a resumed run may be on another machine
        self.first = done
        self.began = time.monotonic()

    def show(self, epoch: int, done: int, loss: float, accuracy: float) -> None:
        self.set_description(f"epoch {epoch + 1}/{self.epochs}", refresh=False)
        self.set_postfix_str(f"loss {loss:.3f}, accuracy {accuracy:.3f}", refresh=False)
        self.update(done - self.n)

    def end_epoch(self, record: dict[str, Any], done: int, images_per_second: float) -> None:
        """Print one line of the history."""
        if not self.main:
            return
        per_image = (time.monotonic() - self.began) / max(done - self.first, 1)
        left = self.format_interval(per_image * (self.images - done))
        scores = f"loss {record['loss']:.4f}, accuracy {record['top1']:.4f}"
        if "validation" in record:
            scores += f", validation {record['validation']['top1']:.4f}"
        speed = f"{images_per_second:.0f} images/s, {left} left"
        with self.external_write_mode():
            print(f"epoch {record['epoch']}/{self.epochs}: {scores}, {speed}", flush=True)


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Yield a list and collect the first of each signal to stop in it; a second SIGINT raises KeyboardInterrupt.

    Signals that are ignored, such as SIGHUP under nohup, stay so.
    """
    received = []
    before: dict[int, Any] = {}

    def handle(number: int, _: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
        for stop in STOPS:
            if signal.getsignal(stop) != signal.SIG_IGN:
                before[stop] = signal.signal(stop, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
