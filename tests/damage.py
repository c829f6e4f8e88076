"""What a disk or a killed copy does to a file, and a disk that is full or read-only."""

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Callable[[str], object]]:
    """A disk of its own at `folder`; yields a function that changes its options. Needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield lambda options: subprocess.run(
            ["mount", "-o", f"remount,{options}", str(folder)], check=True
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
