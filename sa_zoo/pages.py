"""The explorer's page of a model folder: the model, its training path, and images to look at."""

from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.explorer import Page, explore
from sa_zoo.model_folder import load_model
from sa_zoo.training.config import load_config
from sa_zoo.training.heads import HEADS
from sa_zoo.training.model import input_format_of
from sa_zoo.training.sources import open_source
from sa_zoo.training.splits import splits_of

EXPLORER = "explorer.html"


def write_explorer(folder: Path) -> Path | None:
    """Write explorer.html into a model folder; None for a network without maps, or with too many for a page.

    It has photographs that may be published. Whether those of the run's data set may be, only their owner knows.
    """
    model = load_model(str(folder))
    try:
        page = explore(model, source=f"local-dir:{folder.resolve().name}", recorded=_recorded(folder))
    except ValueError:
        return None
    return page.save(folder / EXPLORER)


def explore_source(source: str, files: list[Path] | None = None, count: int = 0) -> Page:
    """The page of a model folder or a name, with pictures from files, or the first test images of the run's data.

    Raises ValueError for a file that is not an image, a source without a data set, and what `explore` raises.
    """
    model, folder = load_model(source), Path(source)
    images: Tensor | Mapping[str, Image.Image] | None = None
    if files:
        images = {path.name: _picture(path) for path in files}
    elif count:
        images = _test_images(model, folder, count)
    loads = f"local-dir:{source}" if folder.is_dir() else source
    return explore(model, images, folder.resolve().name if folder.is_dir() else source, loads, _recorded(folder))


def _recorded(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / HEADS) if (folder / HEADS).is_file() else {}


def _picture(path: Path) -> Image.Image:
    try:
        return Image.open(path).copy()
    except OSError as error:
        raise ValueError(f"image: got {path}, expected a picture: {error}") from error


def _test_images(model: nn.Module, folder: Path, count: int) -> Tensor:
    """The first test images of the run's data set, as the model takes them."""
    if not (folder / "train.toml").is_file():
        raise ValueError(
            f"--images: got {count} for {folder}, which is not a run with a data set; expected --image FILE"
        )
    data, expected = load_config(folder / "train.toml").data, input_format_of(model)
    split = splits_of(open_source(data), 0, expected, torch.device("cpu"), ["test"])["test"]
    return expected.normalize(split.__getitems__(list(range(min(count, len(split)))))[0])
