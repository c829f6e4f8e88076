"""The explorer: one HTML file that shows where a network attends, without a server or a network connection.

The page is explorer_page/, assembled with jinja2. It computes positional attention from the parameters of the heads;
maps that depend on the image are stored in it.
"""

import base64
import hashlib
import html
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_input_data_config
from torch import Tensor, nn

from sa_zoo.analysis.explored_layers import described, recorded_epochs, stored
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.folders.write import write_file

_logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("explorer_page")
SCRIPTS = (
    "maps.js",
    "kernels.js",
    "state.js",
    "drawing.js",
    "panels.js",
    "export.js",
    "page.js",
    "events.js",
)
LARGEST = 10_000_000  # bytes of a page
CREDITS = {"china": "china, danielbuechele, CC BY 2.0", "flower": "flower, vultilion, CC BY 2.0"}


@dataclass(frozen=True)
class Page:
    """A finished page; a notebook shows it."""

    html: str

    def save(self, path: Path | str) -> Path:
        return write_file(Path(path), self.html)

    def _repr_html_(self) -> str:
        # In a frame of its own: no style or script of the page can meet those of the notebook.
        return (
            '<iframe title="Attention explorer" sandbox="allow-scripts allow-downloads" width="100%" height="920" '
            f'style="border: 0" srcdoc="{html.escape(self.html)}"></iframe>'
        )


def explore(
    model: nn.Module,
    images: Tensor | Mapping[str, Image.Image] | None = None,
    title: str = "",
    source: str = "",
    recorded: Mapping[str, Tensor] | None = None,
) -> Page:
    """A page in which to explore the attention of a network, which is put in eval mode.

    Args:
        model: a model of this package, or a vision transformer of timm.
        images: as the model takes them, (B, C, H, W); or pictures by name, which are resized and cropped as timm does
            in evaluation. Default: two photographs that come with scikit-learn.
        title: heading of the page; default: the name of the architecture.
        source: what `timm.create_model` loads the model from, for the code that the page shows.
        recorded: positional parameters by epoch, as in the heads.safetensors of a run.

    Raises:
        ValueError: for images of another kind, for a network without maps that can be shown, or too large for a page.
    """
    expected = resolve_input_data_config(
        model, {"img_size": getattr(model, "_traits", {}).get("img_size")}
    )
    if isinstance(images, Tensor) and images.ndim == 4 and len(images):
        names = [f"image {number}" for number in range(1, len(images) + 1)]
    elif images is None or (
        isinstance(images, Mapping) and all(isinstance(x, Image.Image) for x in images.values())
    ):
        pictures = images or sample_pictures()
        images = _as_input(pictures, expected)
        names = list(pictures)
    else:
        got = (
            f"a tensor {tuple(images.shape)}"
            if isinstance(images, Tensor)
            else type(images).__name__
        )
        raise ValueError(
            f"images: got {got}, expected a tensor (B, C, H, W) of one or more, or {{name: PIL image}}"
        )
    layers = attention_layers(model, images.to(next(model.parameters())))
    architecture = getattr(model, "pretrained_cfg", {}).get("architecture") or type(model).__name__
    pages = [described(layer, recorded or {}) for layer in layers]
    data: dict[str, Any] = {
        "title": title or architecture,
        "source": source,
        "size": list(images.shape[1:]),
        "images": [],
        "epochs": recorded_epochs(recorded or {}),
        "layers": pages,
    }
    varying = [pair for pair in zip(layers, pages, strict=True) if "stored" in pair[1]]
    for number, (name, picture) in enumerate(zip(names, _shown(images, expected), strict=True)):
        maps = [
            stored(layer.maps if layer.positional else layer.maps[number]) for layer, _ in varying
        ]
        room = LARGEST - len(json.dumps([data, maps])) - 100_000  # for the page itself
        if room < 0 and number == 0:
            taken = f"maps of one image take {len(json.dumps(maps)):,} bytes"
            raise ValueError(
                f"model: got {len(layers)} layers whose {taken}, expected less than {LARGEST:,}"
            )
        if room < 0:
            _logger.warning("the page has room for %d of the %d images", number, len(names))
            break
        for (_, page), kept in zip(varying, maps, strict=True):
            page["stored"].append(kept)
        data["images"].append({"name": name, "png": picture})
    return Page(_assembled(data))


def sample_pictures() -> dict[str, Image.Image]:
    """Two photographs that come with scikit-learn, with their authors."""
    bunch = load_sample_images()
    names = [CREDITS[Path(name).stem] for name in bunch.filenames]
    return {name: Image.fromarray(pixels) for name, pixels in zip(names, bunch.images, strict=True)}


def _as_input(pictures: Mapping[str, Image.Image], expected: dict[str, Any]) -> Tensor:
    """Pictures resized, cropped and normalized for a model: (B, C, H, W)"""
    channels, *_ = expected["input_size"]
    if channels not in (1, 3):
        raise ValueError(
            f"images: got pictures for a model of {channels} channels, expected a tensor of its input"
        )
    transform: Any = create_transform(**expected)
    return torch.stack(
        [
            transform(picture.convert("L" if channels == 1 else "RGB"))
            for picture in pictures.values()
        ]
    )


def _shown(images: Tensor, expected: dict[str, Any]) -> list[str]:
    """The pictures that a model sees, as base64 of PNG: the inverse of its normalization, of at most 3 channels."""
    mean, std = (torch.tensor(expected[key]).view(-1, 1, 1) for key in ("mean", "std"))
    pixels = (images.cpu() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    encoded = []
    for picture in pixels[:, [0] if pixels.shape[1] < 3 else [0, 1, 2]]:
        content = BytesIO()
        Image.fromarray(picture.permute(1, 2, 0).squeeze(-1).numpy()).save(
            content, "png", optimize=True
        )
        encoded.append(base64.b64encode(content.getvalue()).decode())
    return encoded


def _assembled(data: dict[str, Any]) -> str:
    """The page. Its policy forbids every connection and every script but its own."""
    script = "\n".join((SOURCE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n{script}'
    template = jinja2.Template(
        (SOURCE / "page.html.jinja").read_text(encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
    )
    return template.render(
        title=data["title"],
        style=(SOURCE / "page.css").read_text(encoding="utf-8"),
        script=script,
        allowed=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # In a script element only `<` can end the data, or begin a comment.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )
