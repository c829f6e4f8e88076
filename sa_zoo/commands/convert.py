"""From a trained CNN to a complete folder of an attention network."""

import math
from pathlib import Path
from typing import Any

import timm
from timm.models import PretrainedCfg
from torch import nn

from sa_zoo.commands.finish import finish
from sa_zoo.convolution.network_conversion import NetworkReport, convert
from sa_zoo.convolution.timm_backbones import backbone_cfg
from sa_zoo.folders.metrics import Conversion, metrics_of, write_metrics
from sa_zoo.folders.write import new_folder, write_file, write_timm_files
from sa_zoo.models.network import AttentionNetwork
from sa_zoo.opened import Opened, base_model_of, open_model


def convert_model(
    source: str,
    out: Path,
    layers: str = "*",
    alpha: float = 46.0,
) -> tuple[Opened, NetworkReport]:
    """Turn the convolutions of a trained CNN into attention, in a complete folder `out`.

    `layers` and `alpha` are those of `sa_zoo.convert`. Raises FileExistsError if `out` is not empty, ValueError if the
    network cannot be converted or written, and the errors of `open_model`.
    """
    if math.isinf(alpha):
        raise ValueError(
            "alpha: got inf, which JSON cannot hold, expected a number; 46 gives the same function"
        )
    conversion: dict[str, Any] = {"layers": layers, "alpha": alpha}
    with new_folder(out) as new:
        cnn = open_model(source)
        if isinstance(cnn.network, AttentionNetwork):
            raise ValueError(
                f"source: got {cnn.source}, which is a network of attention, expected a CNN"
            )
        network, report = convert(cnn.network, **conversion)
        backbone = _registered(cnn.network, conversion)
        backbone.load_state_dict(network.state_dict())
        write_timm_files(new, backbone)
        write_file(new / "report.md", report.table())
        measured = Conversion(**conversion, logits=report.logits)
        known = {
            "base_model": base_model_of(cnn.source, cnn.network) or None,
            "held_out": cnn.metrics.held_out,
        }
        write_metrics(new, metrics_of(backbone, conversion=measured, **known))
        converted = finish(open_model(new))
    return converted.moved(out), report


def _registered(network: nn.Module, conversion: dict[str, Any]) -> Any:
    """The registered network with the structure of the converted one, for config.json to name."""
    cfg: Any = network.pretrained_cfg
    arguments = getattr(network, "_model_args", {}) | conversion
    name = f"mhsa_{cfg['architecture']}"
    if not timm.is_model(name):
        name = "mhsa_network"
        arguments["cnn"] = cfg["architecture"]
    cfg = backbone_cfg(PretrainedCfg(**cfg)).to_dict() | {"architecture": name}
    return timm.create_model(name, pretrained_cfg=cfg, **arguments).eval()
