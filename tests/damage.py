"""What a disk or a killed copy does to a file."""

import random
from collections.abc import Callable
from pathlib import Path


def flip(path: Path, seed: int = 0) -> None:
    """Flip one random bit."""
    content = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "vanished": lambda path: path.unlink(),
}
