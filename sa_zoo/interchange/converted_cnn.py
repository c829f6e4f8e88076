"""Converts a trained CNN to a folder of the equivalent attention network, which timm and transformers load."""

import math
from pathlib import Path
from typing import Any

import timm
from timm.models import PretrainedCfg

from sa_zoo.convolution.network_conversion import Report, convert
from sa_zoo.convolution.timm_backbones import backbone_cfg
from sa_zoo.folders.metrics import Conversion, Metrics, write_metrics
from sa_zoo.folders.opened import load_model
from sa_zoo.folders.write import check_new, new_folder, write_file, write_timm_files
from sa_zoo.models.network import SANet


def convert_to_folder(
    source: str, out: Path, layers: str = "*", alpha: float = 46.0, content: bool = False
) -> Report:
    """Convert a trained CNN and write a model folder: timm's two files, metrics.json, and the report as .md and .json.

    The arguments are those of `load_model` and `convert`. Raises FileExistsError if `out` is not empty, ValueError for
    what cannot be converted or written, and what `load_model` raises.
    """
    check_new(out)
    if math.isinf(alpha):
        raise ValueError(
            "alpha: got inf, which JSON cannot hold, expected a number; 46 gives the same function"
        )
    network: Any = load_model(source).eval()
    if isinstance(network, SANet):
        raise ValueError(f"source: got {source}, which is a network of attention, expected a CNN")
    converted, report = convert(network, layers, alpha, content)
    # the registered network that equals the converted one: config.json can name it
    cnn, arguments = network.pretrained_cfg["architecture"], getattr(network, "_model_args", {})
    if not timm.is_model(name := f"mhsa_{cnn}"):
        name, arguments = "mhsa_network", arguments | {"cnn": cnn}
    cfg = backbone_cfg(PretrainedCfg(**network.pretrained_cfg)).to_dict() | {"architecture": name}
    arguments = arguments | {"alpha": alpha, "layers": layers, "content": content}
    backbone = timm.create_model(name, pretrained_cfg=cfg, **arguments).eval()
    backbone.load_state_dict(converted.state_dict())
    conversion = Conversion(layers=layers, alpha=alpha, content=content, logits=report.logits)
    base = (network.pretrained_cfg.get("hf_hub_id") or "").partition("@")[0]
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    names = {
        key: cfg[key] for key in ("label_names", "label_descriptions") if cfg.get(key)
    }  # transformers reads them
    with new_folder(out) as folder:
        write_timm_files(folder, backbone, model_config=names)
        write_file(folder / "report.md", report.table())
        write_file(folder / "report.json", report.to_json())
        write_metrics(
            folder,
            Metrics(model=name, parameters=parameters, base_model=base, conversion=conversion),
        )
    return report
