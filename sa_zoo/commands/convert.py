"""From a trained CNN to a complete folder of an attention network."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from timm.models import PretrainedCfg
from torch import nn

from sa_zoo.commands.evaluate import data_for
from sa_zoo.commands.finish import finish
from sa_zoo.convolution.network_conversion import NetworkReport, convert
from sa_zoo.convolution.timm_backbones import backbone_cfg
from sa_zoo.folders.metrics import Baseline, Conversion, metrics_of, write_metrics, write_test
from sa_zoo.folders.write import new_folder, write_file, write_timm_files
from sa_zoo.models.network import AttentionNetwork
from sa_zoo.opened import Opened, base_model_of, open_model
from sa_zoo.publishing.card import write_card
from sa_zoo.training.evaluate import evaluate_opened


def convert_model(
    source: str,
    out: Path,
    layers: str = "*",
    alpha: float = 46.0,
    data: str = "",
) -> tuple[Opened, NetworkReport]:
    """Turn the convolutions of a trained CNN into attention, in a complete folder `out`.

    `layers` and `alpha` are those of `sa_zoo.convert`. With `data`, the test accuracy before and after goes
    into metrics.json and the card; if that fails, the folder stays. Raises FileExistsError if `out` is not empty,
    ValueError if the network cannot be converted or written, and the errors of `open_model`.
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
    converted = converted.moved(out)
    if data:
        converted = _compared(cnn, converted, data)
    return converted, report


def conversion_report(converted: Opened, report: NetworkReport) -> str:
    """The report of a conversion, with the test accuracy before and after, if measured."""
    text = report.table()
    before = converted.metrics.baseline
    after = converted.metrics.test
    if before and after:
        text += f"test accuracy {before.test} before, {after} after\n"
    return text.rstrip()


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


def _compared(cnn: Opened, converted: Opened, data: str) -> Opened:
    """Measure both networks, and put the results into the folder of the converted one."""
    try:
        config = data_for(cnn, data)
        before = evaluate_opened(cnn, config).test
        # on the same images: the converted network was trained on the data of the CNN, too
        after = evaluate_opened(replace(cnn, network=converted.network), config)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; the conversion is in {converted.folder}") from error
    assert before
    baseline = Baseline(model=cnn.config.get("architecture", cnn.source), test=before)
    metrics = write_test(converted.local_folder, after, baseline=baseline)
    measured = replace(converted, metrics=metrics)
    write_card(measured)
    return measured
