"""Progress over images: a bar on a terminal, elsewhere one line."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

MANY = 2_000  # images; more take noticeable time
# Of names that come from others; a terminal would obey them.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_main_process() -> bool:
    """Whether this is the first of the processes that `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print to stderr in the main process, without control characters."""
    if is_main_process():
        print(CONTROL.sub("", text), file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether progress can be drawn. Services replace sys.stderr by None or by an object without isatty."""
    return is_main_process() and getattr(sys.stderr, "isatty", bool)()


@contextmanager
def shown(images: Sequence[Any], doing: str) -> Iterator[Iterable[Any]]:
    """The images, with a progress bar on a terminal after a second; elsewhere one line, if there are many images.

    The KeyboardInterrupt of Ctrl-C names the interrupted task.
    """
    task = f"{doing} {len(images)} images"
    bar = on_terminal()
    if len(images) > MANY and not bar:
        say(task)
    try:
        yield tqdm(images, doing, unit=" images", delay=1, leave=False, disable=not bar)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while {task}") from error
