"""The explorer's page of a model, with pictures from files."""

from pathlib import Path

from PIL import Image

from sa_zoo.analysis.explorer import Page, page_of
from sa_zoo.data.image_file import open_image
from sa_zoo.opened import open_model


def explore_source(source: str, files: list[Path] | None = None) -> Page:
    """The page of a model folder or name.

    Raises ValueError for a file other than a picture, and the errors of `open_model` and `explore`.
    """
    pictures = _pictures(files or [])
    opened = open_model(source)
    return page_of(opened, opened.source, pictures or None)


def _pictures(files: list[Path]) -> dict[str, Image.Image]:
    """Pictures by file name, or by path if several files share a name."""
    names = [path.name for path in files]
    pictures = {}
    for path in files:
        name = path.name if names.count(path.name) == 1 else str(path)
        try:
            pictures[name] = open_image(path)
        except ValueError as error:
            raise ValueError(f"--image: got {path}, expected a picture: {error}") from error
    return pictures
