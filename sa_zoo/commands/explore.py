"""The explorer's page of a model: attention, training path and images."""

from pathlib import Path

from PIL import Image

from sa_zoo.analysis.explorer import Page, page_of
from sa_zoo.data.image_file import open_image
from sa_zoo.data.open_images import open_images
from sa_zoo.opened import Opened, open_model
from sa_zoo.training.config import data_of


def explore_source(source: str, files: list[Path] | None = None, count: int = 0) -> Page:
    """The page of a model folder or name, with pictures from files, or the first test images of the run.

    Raises ValueError for a file other than a picture or a source without a data set, and the errors of `open_model`
    and `explore`.
    """
    pictures = _pictures(files or [])
    opened = open_model(source)
    if count and not pictures:
        pictures = _test_pictures(opened, count)
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


def _test_pictures(opened: Opened, count: int) -> dict[str, Image.Image]:
    """The first test images of the run's data, by number and class; training images if there is no test split."""
    if opened.folder is None or not (opened.folder / "train.toml").is_file():
        raise ValueError(
            f"--images: got {count} for {opened.source}, which is no run with a data set; expected --image FILE"
        )
    source = open_images(data_of(opened.folder))
    split = "test" if "test" in source.images else "train"
    pictures = {}
    for row, label in enumerate(source.labels[split][:count].tolist()):
        pictures[f"{row + 1}: {source.classes[label]}"] = source.images[split][row]
    return pictures
