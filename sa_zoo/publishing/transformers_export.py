"""Makes a timm folder loadable by transformers, with this package or, as remote code, without it."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn
from transformers import AutoImageProcessor, CLIPImageProcessor
from transformers.dynamic_module_utils import custom_object_save
from transformers.image_utils import PILImageResampling

from sa_zoo.models.configuration_sa import SIZES, SAConfig
from sa_zoo.models.modeling_sa import SAForImageClassification
from sa_zoo.models.terms import has_fixed_size
from sa_zoo.models.variants import ATTENTION_TYPES, TYPES
from sa_zoo.opened import Opened


def transformers_files(opened: Opened) -> dict[str, bytes]:
    """preprocessor_config.json, the code, and config.json with the keys of transformers, for the networks of models/.

    Other models need none: transformers loads them through its timm wrapper. Raises ValueError for a network without
    average pooling, a crop outside the center, or an image processor unlike timm's.
    """
    network = opened.network
    _check_processor(opened)
    kind = ATTENTION_TYPES.get(opened.config["architecture"])
    if kind is None:
        return {}
    if opened.config.get("model_type") == SAConfig.model_type:
        config = SAConfig.from_pretrained(opened.local_folder)
    else:
        config = _config(network, kind, opened.config["pretrained_cfg"])
    return {
        "preprocessor_config.json": _image_processor(network).to_json_string().encode(),
        **remote_code(),
        # last, as it refers to the other files
        "config.json": config.to_json_string().encode(),
    }


def remote_code() -> dict[str, bytes]:
    """The code files of a folder with `auto_map` in its config.json."""
    with TemporaryDirectory() as temporary:
        custom_object_save(SAForImageClassification, temporary)
        return {path.name: path.read_bytes() for path in Path(temporary).glob("*.py")}


def _config(network: Any, kind: str, pretrained_cfg: dict[str, Any]) -> SAConfig:
    """The configuration of a network built by timm; `pretrained_cfg` is the one in its config.json."""
    if network.global_pool != "avg":
        raise ValueError(
            f"global_pool: got {network.global_pool!r}, expected 'avg', which the transformers classes do"
        )
    names = network.pretrained_cfg.get("label_names") or ()
    if len(names) != network.num_classes:
        names = [f"LABEL_{index}" for index in range(network.num_classes)]
    fixed = has_fixed_size(TYPES[kind].terms)
    height, width = network.img_size if fixed else pretrained_cfg["input_size"][1:]
    return SAConfig(
        attention_type=kind,
        image_size=height if height == width else [height, width],
        **{SIZES[name]: size for name, size in network.sizes.items()},
        num_channels=network.in_chans,
        architecture=network.pretrained_cfg["architecture"],
        architectures=[SAForImageClassification.__name__],
        pretrained_cfg=pretrained_cfg,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )


def _check_processor(opened: Opened) -> None:
    """Raise ValueError if the folder has an image processor with another result than timm's transform."""
    path = opened.local_folder / "preprocessor_config.json"
    if not path.is_file():
        return
    processor = _image_processor(opened.network).to_json_string()
    # From an interrupted `finish`; it means something else before config.json is complete.
    if path.read_bytes() == processor.encode():
        return
    found = AutoImageProcessor.from_pretrained(opened.local_folder, trust_remote_code=False)
    stored, expected = json.loads(found.to_json_string()), json.loads(processor)
    for key, value in expected.items():
        if stored.get(key) != value:
            raise ValueError(
                f"preprocessor_config.json: got {key} {stored.get(key)}, expected {value} by pretrained_cfg in "
                "config.json, which timm reads: make them agree"
            )


def _image_processor(network: nn.Module) -> CLIPImageProcessor:
    """The processor equivalent to timm's evaluation transform: resize, crop in the center, normalize.

    It resizes tensors; results differ from timm's PIL images by about one gray level, with backend="pil" not at all.
    For a network with non-square input, the whole image is resized, not cropped.
    """
    data = resolve_model_data_config(network)
    if data["crop_mode"] != "center":
        raise ValueError(f"crop_mode: got {data['crop_mode']!r}, expected 'center'")
    channels, height, width = data["input_size"]
    size = {"height": height, "width": width}
    return CLIPImageProcessor(
        size={"shortest_edge": math.floor(height / data["crop_pct"])} if height == width else size,
        crop_size=size,
        resample=getattr(PILImageResampling, data["interpolation"].upper()),
        image_mean=data["mean"],
        image_std=data["std"],
        do_convert_rgb=channels == 3,
    )
