"""python scripts/sweep_conversions.py [NAME ...] [--side 96] [--json docs/conversions.json]

Converts networks of many kinds, with random weights and random batch-norm statistics, and compares logits: in the hard
limit (alpha 46, layers run as convolutions) and at alpha 20 (layers run as attention). Exits with
an error if any logit differs by more than 1e-4 of the largest one in float32.

The deepest EfficientNets are not in the list: with random weights they are chaotic, so that even the CNN's own logits
in float32 and in float64 have little in common.
"""

from pathlib import Path
from typing import Annotated

import timm
import torch
import typer
from torch import nn

from sa_zoo.convolution.network_conversion import convert
from sa_zoo.folders.write import write_json

ARCHITECTURES = (
    "resnet18",
    "resnet50",
    "resnet50d",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "seresnet50",
    "skresnet18",
    "res2net50_26w_4s",
    "resnest14d",
    "resnetblur50",
    "vgg11_bn",
    "vgg13",
    "densenet121",
    "dpn68",
    "inception_v3",
    "inception_v4",
    "xception41",
    "darknet53",
    "cspdarknet53",
    "hrnet_w18_small",
    "dla34",
    "ese_vovnet19b_dw",
    "selecsls42b",
    "repvgg_a0",
    "mobileone_s0",
    "regnetx_002",
    "regnety_002",
    "mnasnet_100",
    "mobilenetv2_100",
    "mobilenetv3_small_100",
    "mobilenetv4_conv_small",
    "efficientnet_b0",
    "tf_efficientnet_b0",
    "tf_efficientnetv2_b0",
    "tf_mixnet_s",
    "ghostnet_100",
    "rexnet_100",
    "convnext_atto",
    "convnextv2_atto",
    "fasternet_t0",
    "hgnetv2_b0",
    "starnet_s1",
    "edgenext_xx_small",
    "mobilevit_xxs",
    "coat_tiny",
)
TOLERANCE = 1e-4


def randomize(network: nn.Module) -> None:
    """Batch norms as after training: no statistic, scale or shift is left at its initial value."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.1)


def sweep(name: str, side: int) -> dict[str, str | int | float]:
    """The row of one architecture: numbers of layers and heads, and differences of logits relative to the largest."""
    torch.manual_seed(0)
    network = timm.create_model(name).eval()
    randomize(network)
    channels, *size = network.pretrained_cfg["input_size"]
    if not network.pretrained_cfg.get("fixed_input_size"):
        size = [min(side, length) for length in size]
    example = torch.randn(2, channels, *size)
    _, hard = convert(network, alpha=46.0, example=example)
    _, soft = convert(network, alpha=20.0, example=example)
    heads = sum(layer.heads for layer in hard.layers)
    counts = {"layers": len(hard.layers), "heads": heads, "left": len(hard.skipped)}
    return {"architecture": name, **counts, "hard": hard.logits, "soft": soft.logits}


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="timm names; the list in this file if none.")
    ] = None,
    side: Annotated[
        int, typer.Option(help="Side of images, where the network takes any size.")
    ] = 96,
    json: Annotated[
        Path | None, typer.Option(help="File to write, which scripts/render_docs.py reads.")
    ] = None,
) -> None:
    rows = []
    for name in names or ARCHITECTURES:
        rows.append(sweep(name, side))
        print(*rows[-1].values(), flush=True)
    if json:
        command = f"python scripts/sweep_conversions.py --side {side}"
        conditions = {"weights": "random, with random batch-norm statistics", "type": "float32"}
        conditions |= {"torch": torch.__version__, "timm": timm.__version__, "runs": 1}
        write_json(json, {"command": command, "conditions": conditions, "rows": rows})
    wrong = [row["architecture"] for row in rows if not max(row["hard"], row["soft"]) <= TOLERANCE]
    if wrong:
        raise SystemExit(f"logits differ by more than {TOLERANCE:g}: {', '.join(wrong)}")


if __name__ == "__main__":
    typer.run(main)
