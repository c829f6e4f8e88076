"""Writes the attention network that equals a trained CNN as a model folder, which timm and transformers load."""

import math
from pathlib import Path
from typing import Any

import timm
from timm.models import PretrainedCfg
from torch import nn

from sa_zoo.convolution.network_conversion import NetworkReport, convert
from sa_zoo.convolution.timm_backbones import backbone_cfg
from sa_zoo.folders.metrics import Conversion, Metrics, write_metrics
from sa_zoo.folders.opened import Opened
from sa_zoo.folders.write import write_file, write_timm_files
from sa_zoo.models.network import SANet


def write_converted(
    opened: Opened, folder: Path, layers: str = "*", alpha: float = 46.0, content: bool = False
) -> NetworkReport:
    """Convert a trained CNN and write timm's two files, metrics.json and the report into an empty folder.

    The arguments are those of `convert`. Raises ValueError for a network that cannot be converted or written.
    """
    if math.isinf(alpha):
        raise ValueError(
            "alpha: got inf, which JSON cannot hold, expected a number; 46 gives the same function"
        )
    network: Any = opened.network
    if isinstance(network, SANet):
        raise ValueError(
            f"source: got {opened.source}, which is a network of attention, expected a CNN"
        )
    conversion: dict[str, Any] = {"layers": layers, "alpha": alpha, "content": content}
    converted, report = convert(network, **conversion)
    backbone = _registered(network, conversion)
    backbone.load_state_dict(converted.state_dict())
    write_timm_files(folder, backbone)
    write_file(folder / "report.md", report.table())
    metrics = Metrics(
        model=backbone.pretrained_cfg["architecture"],
        parameters=sum(parameter.numel() for parameter in backbone.parameters()),
        base_model=(network.pretrained_cfg.get("hf_hub_id") or "").partition("@")[0],
        conversion=Conversion(**conversion, logits=report.logits),
    )
    write_metrics(folder, metrics)
    return report


def _registered(network: nn.Module, conversion: dict[str, Any]) -> Any:
    """The registered network that is built as the converted one, so that config.json can name it."""
    cnn = network.pretrained_cfg["architecture"]  # type: ignore[index]
    arguments = getattr(network, "_model_args", {})
    name = f"mhsa_{cnn}"
    if not timm.is_model(name):
        name = "mhsa_network"
        arguments = arguments | {"cnn": cnn}
    cfg = backbone_cfg(PretrainedCfg(**network.pretrained_cfg)).to_dict()  # type: ignore[arg-type]
    cfg["architecture"] = name
    return timm.create_model(name, pretrained_cfg=cfg, **(arguments | conversion)).eval()
