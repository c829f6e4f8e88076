"""The explorer: one HTML file with the attention of a network, without a server or a connection.

The page is assembled from explorer_page/ with jinja2. It computes positional attention from the parameters of the
heads, and stores maps that depend on the image.
"""

import base64
import hashlib
import html
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from sa_zoo.analysis.explored_layers import Json, layer_data, pack_maps
from sa_zoo.analysis.maps import LayerMaps, attention_layers
from sa_zoo.data.input_format import COLORS, InputFormat, input_format_of
from sa_zoo.folders.write import write_file
from sa_zoo.opened import Opened

_logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("explorer_page")
SCRIPTS = ("maps", "kernels", "state", "drawing", "panels", "export", "page", "events")
DATA_BYTES = 9_900_000  # of a page; the rest takes less than 100,000
PATH_EPOCHS = 100  # of a training path, after its start
SAMPLES = {  # photographs in scikit-learn, with their authors
    "china, danielbuechele, CC BY 2.0": "china.jpg",
    "flower, vultilion, CC BY 2.0": "flower.jpg",
}


@dataclass(frozen=True)
class Page:
    """A finished page, shown by notebooks."""

    html: str = field(repr=False)

    def save(self, path: Path | str) -> Path:
        return write_file(Path(path), self.html)

    def _repr_html_(self) -> str:
        # A frame separates styles and scripts of the page from those of the notebook.
        return (
            '<iframe title="Attention explorer" sandbox="allow-scripts allow-downloads" width="100%" height="920" '
            f'style="border: 0" srcdoc="{html.escape(self.html)}"></iframe>'
        )


def explore(
    model: nn.Module,
    images: Tensor | Mapping[str, Image.Image] | None = None,
    source: str = "",
    recorded: Mapping[str, Tensor] | None = None,
) -> Page:
    """A page to explore the attention of a network. Puts the network in eval mode.

    Args:
        model: a model of this package, or a vision transformer of timm.
        images: inputs of the model, (B, C, H, W); or pictures by name, to be resized and cropped as in timm's
            evaluation. Default: two photographs from scikit-learn.
        source: the name for `timm.create_model` in the code on the page.
        recorded: positional parameters by epoch, as in the heads.safetensors of a run.

    Raises:
        ValueError: for images of another kind, or a network without attention maps or too large for a page.
    """
    input_format = input_format_of(model)
    inputs = _prepare_inputs(images, input_format)
    batch = torch.stack(list(inputs.values()))
    layers = attention_layers(model, batch.to(next(model.parameters())))
    title = getattr(model, "pretrained_cfg", {}).get("architecture") or type(model).__name__
    recorded = recorded or {}
    rows = min(map(len, recorded.values()), default=0)
    epochs = torch.linspace(0, rows - 1, min(rows, PATH_EPOCHS + 1)).round().int().tolist()
    path = {name: rows[epochs] for name, rows in recorded.items()}
    pictures = {name: _png_of_input(image, input_format) for name, image in inputs.items()}
    data = {
        "title": title,
        "source": source,
        "size": batch.shape[1:],
        "images": [],
        "epochs": epochs,
        "layers": [layer_data(layer, path) for layer in layers],
    }
    _add_images(data, layers, pictures)
    return Page(_render(data))


def explorer_files(opened: Opened) -> dict[str, bytes]:
    """explorer.html of a model; none without maps, or with too many maps for a page.

    Shows freely licensed photographs, as the images of the run may not be public.
    """
    try:
        page = page_of(opened, f"local-dir:{opened.local_folder.resolve().name}")
    except ValueError:
        return {}
    return {"explorer.html": page.html.encode()}


def page_of(opened: Opened, load_from: str, pictures: dict[str, Image.Image] | None = None) -> Page:
    """The page of a model. Its code loads the model from `load_from`."""
    recorded = opened.tensors("heads.safetensors")
    return explore(opened.network, pictures, source=load_from, recorded=recorded)


def _prepare_inputs(images: Any, input_format: InputFormat) -> dict[str, Tensor]:
    """Inputs of the model, (C, H, W), by name: pictures are resized, cropped and normalized.

    Raises ValueError for images of another kind.
    """
    channels = input_format.input_size[0]
    if isinstance(images, Tensor) and images.ndim == 4 and len(images):
        return {f"image {number}": image for number, image in enumerate(images, start=1)}
    if images is None:
        images = {name: Image.fromarray(load_sample_image(file)) for name, file in SAMPLES.items()}
    pictures = images.values() if isinstance(images, Mapping) and channels in COLORS else []
    if pictures and all(isinstance(picture, Image.Image) for picture in pictures):
        resized = {name: input_format.resized(picture) for name, picture in images.items()}
        return {name: input_format.normalize(x[None])[0] for name, x in resized.items()}
    got = getattr(images, "shape", type(images).__name__)
    raise ValueError(
        f"images: got {got} for a model of {channels} channels, expected a tensor "
        "(B, C, H, W) of one or more, or {name: PIL image} for one or three channels"
    )


def _add_images(data: Json, layers: list[LayerMaps], pictures: dict[str, str]) -> None:
    """Add as many images to a page as fit, with the maps that it cannot compute, by index of the layer."""
    room = DATA_BYTES - len(json.dumps(data))
    stored = {index: layer for index, layer in enumerate(layers) if layer.kind == "stored"}
    for number, (name, png) in enumerate(pictures.items()):
        maps = {index: pack_maps(layer, number) for index, layer in stored.items()}
        image = {"name": name, "png": png, "maps": maps}
        taken = len(json.dumps(image))
        if number == 0 and taken > room:
            raise ValueError(
                f"model: got {len(layers)} layers whose maps of one image take {taken:,} bytes, "
                f"expected at most {room:,}"
            )
        if taken > room:
            _logger.warning("the page has room for %d of the %d images", number, len(pictures))
            break
        room -= taken
        data["images"].append(image)


def _png_of_input(image: Tensor, input_format: InputFormat) -> str:
    """The picture of an input (C, H, W), as base64 of PNG: the inverse of its normalization.

    Shows the first three channels, or the first in gray if there are fewer.
    """
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (input_format.mean, input_format.std))
    pixels = (image.cpu() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    colors = pixels[:3] if len(pixels) >= 3 else pixels[:1]
    content = BytesIO()
    to_pil_image(colors).save(content, "png", optimize=True)
    return base64.b64encode(content.getvalue()).decode()


def _render(data: Json) -> str:
    """The page. Its security policy forbids connections and all scripts but its own."""
    script = "\n".join((SOURCE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
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
        # In a script element only `<` can end the data or begin a comment.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )
