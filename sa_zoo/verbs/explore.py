"""The explorer's page of a model folder: the model, its training path, and images to look at."""

from itertools import islice
from pathlib import Path

from PIL import Image
from safetensors.torch import load_file

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.explorer import Page, explore
from sa_zoo.folders.opened import load_model
from sa_zoo.training.config import load_config
from sa_zoo.training.pictures import open_picture
from sa_zoo.training.sources import open_source


def explore_source(
    source: str, files: list[Path] | None = None, count: int = 0, load_from: str = ""
) -> Page:
    """The page of a model folder or a name, with pictures from files, or the first test images of the run's data.

    `load_from` is shown as what to load the model from. Raises ValueError for a file that is not a picture, for a
    source without a data set, and what `load_model` and `explore` raise.
    """
    folder = Path(source)
    names = [path.name for path in files or []]
    shown = {
        path.name if names.count(path.name) == 1 else str(path): _picture(path)
        for path in files or []
    }
    pictures = shown or _test_pictures(folder, count)
    heads = folder / "heads.safetensors"
    recorded = load_file(heads) if heads.is_file() else {}
    load_from = load_from or (f"local-dir:{source}" if folder.is_dir() else source)
    return explore(load_model(source), pictures, source=load_from, recorded=recorded)


def write_explorer(folder: Path, name: str) -> Path | None:
    """Write explorer.html into a model folder `name`; None without weights or maps, or with too many maps for a page.

    It has photographs that may be published. Whether those of the run's data set may be, only their owner knows.
    """
    if not (folder / "model.safetensors").is_file():
        return None
    try:
        page = explore_source(str(folder), load_from=f"local-dir:{name}")
    except ValueError:
        return None
    return page.save(folder / "explorer.html")


def _picture(path: Path) -> Image.Image:
    try:
        return open_picture(path)
    except ValueError as error:
        raise ValueError(f"--image: got {path}, expected a picture: {error}") from error


def _test_pictures(folder: Path, count: int) -> dict[str, Image.Image]:
    """The first test images of the run's data set, by number and class; of its training images if it has no others."""
    if count and not (folder / "train.toml").is_file():
        raise ValueError(
            f"--images: got {count} for {folder}, which is no run with a data set; expected --image FILE"
        )
    if not count:
        return {}
    source = open_source(load_config(folder / "train.toml").data)
    split = "test" if "test" in source.images else "train"
    labels = enumerate(source.labels[split].tolist(), start=1)
    pairs = zip(labels, islice(source.images[split], count), strict=False)
    return {f"{number}: {source.classes[label]}": picture for (number, label), picture in pairs}
