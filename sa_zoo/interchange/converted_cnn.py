"""A trained CNN as a folder of its conv-equivalent backbone, which timm and transformers load and the Hub takes."""

import json
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
from safetensors.torch import save_file
from timm.models import PretrainedCfg
from timm.models._hub import save_config_for_hf
from torch import nn

from sa_zoo.convolution.network_conversion import Report, convert
from sa_zoo.convolution.timm_backbones import backbone_cfg


def convert_to_folder(source: str, out: Path, layers: str = "*", alpha: float = 46.0, content: bool = False) -> Report:
    """Convert a trained CNN and write what came of it, all or nothing.

        model.safetensors, config.json   timm.create_model("local-dir:OUT", pretrained=True)
        report.md, report.json           what the conversion changed, layer by layer
        metrics.json                     model, base_model, conversion; results of an evaluation belong there too

    Args:
        source: a timm name with weights, "hf-hub:OWNER/NAME", "local-dir:FOLDER" or a run folder.
        out: a folder that does not exist yet, or is empty.
        layers, alpha, content: as `convert`'s.

    Raises FileExistsError for a folder that is not empty, ValueError for what cannot be converted or written.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"out: got {out}, which is not empty, expected a new folder")
    if math.isinf(alpha):
        raise ValueError("alpha: got inf, which JSON cannot hold, expected a number; 46 gives the same function")
    network = timm.create_model(f"local-dir:{source}" if Path(source).is_dir() else source, pretrained=True).eval()
    converted, report = convert(network, layers, alpha, content)
    backbone = _backbone(network, alpha=alpha, layers=layers, content=content)
    backbone.load_state_dict(converted.state_dict())
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        finished = Path(folder) / "finished"
        finished.mkdir()
        _write(backbone, finished)
        (finished / "report.md").write_text(report.table(), encoding="utf-8")
        (finished / "report.json").write_text(report.to_json(), encoding="utf-8")
        metrics = {
            "model": backbone.pretrained_cfg["architecture"],
            "base_model": network.pretrained_cfg.get("hf_hub_id") or "",
            "conversion": {"layers": layers, "alpha": alpha, "content": content, "logits": report.logits},
        }
        (finished / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        for path in finished.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        finished.replace(out)
    return report


def _backbone(network: nn.Module, **arguments) -> nn.Module:
    """The registered backbone of this CNN, without its weights, so that a config.json can name it."""
    cnn = network.pretrained_cfg["architecture"]
    name = f"mhsa_{cnn}"
    arguments |= getattr(network, "_model_args", {})
    if not timm.is_model(name):
        name, arguments = "mhsa_network", arguments | {"cnn": cnn}
    cfg = backbone_cfg(PretrainedCfg(**network.pretrained_cfg)).to_dict() | {"architecture": name}
    return timm.create_model(name, pretrained_cfg=cfg, **arguments).eval()


def _write(backbone: nn.Module, folder: Path) -> None:
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_config_for_hf(backbone, str(folder / "config.json"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_args"].pop("num_classes", None)  # transformers refuses it there; timm reads the one outside
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
