"""The classes of image files, as lines of text."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from sa_zoo.data.image_file import EXTENSIONS
from sa_zoo.opened import open_model


def predictions(model: str, files: Iterable[Path], top: int) -> Iterator[str]:
    """A line per image of these files and folders: its path, and the `top` classes with their probabilities.

    Raises ValueError for a folder without images and the errors of `open_model`; at the end, ValueError with all files
    that are not usable images.
    """
    images = [image for path in files for image in _images_in(path)]
    classify = open_model(model).classifier(top)
    unreadable = []
    for image in images:
        try:
            classes = "; ".join(f"{name} {p:.3f}" for name, p in classify(image))
        except ValueError as error:
            unreadable.append(str(error))
        else:
            yield " ".join(f"{image}: {classes}".splitlines())
    if unreadable:
        named = "\n".join(unreadable)
        raise ValueError(f"got {len(unreadable)} files that cannot be read: {named}")


def _images_in(path: Path) -> list[Path]:
    """All images in a folder; a path to anything else by itself."""
    if not path.is_dir():
        return [path]
    files = [file for file in path.rglob("[!.]*") if file.suffix.lower() in EXTENSIONS]
    if not files:
        raise ValueError(f"got {path} without images, expected files, or a folder of them")
    return sorted(files)
