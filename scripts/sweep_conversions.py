"""python scripts/sweep_conversions.py --out runs/sweep

Converts networks of many kinds, with random weights and random batch-norm statistics, and compares logits: in the hard
limit (alpha 46, layers run as convolutions) and at alpha 20 (layers run as attention, by composed kernels). Writes
sweep.json and sweep.md. Exits with an error if any logit differs by more than 1e-4 of the largest in float32.

The deepest EfficientNets are not in the list: with random weights they are chaotic, so that even the CNN's own logits
in float32 and in float64 have little in common.
"""

import argparse
import json
from pathlib import Path

import timm
import torch
from torch import nn

from sa_zoo.convolution.network_conversion import convert

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


def randomise(network: nn.Module) -> None:
    """Batch norms as after training: no statistic, scale or shift is left at its initial value."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.1)


def sweep(name: str, side: int) -> dict[str, object]:
    """The row of one architecture: layers, heads, and differences of logits relative to the largest."""
    torch.manual_seed(0)
    network = timm.create_model(name).eval()
    randomise(network)
    channels, *size = network.pretrained_cfg["input_size"]
    if not network.pretrained_cfg.get("fixed_input_size"):
        size = [min(side, length) for length in size]
    example = torch.randn(2, channels, *size)
    _, hard = convert(network, alpha=46.0, example=example)
    _, soft = convert(network, alpha=20.0, example=example)
    return {
        "architecture": name,
        "layers": len(hard.layers),
        "heads": sum(layer.heads for layer in hard.layers),
        "left": hard.skipped,
        "hard": hard.logits,
        "soft": soft.logits,
    }


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| architecture | layers | heads | left as convolutions | alpha 46 | alpha 20 |", "|---" * 6 + "|"]
    for row in rows:
        name, layers, heads, left = (row[key] for key in ("architecture", "layers", "heads", "left"))
        lines.append(f"| {name} | {layers} | {heads:,} | {len(left)} | {row['hard']:.1e} | {row['soft']:.1e} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[2])
    parser.add_argument("--out", type=Path, required=True, help="folder for sweep.json and sweep.md")
    parser.add_argument("--side", type=int, default=128, help="of images, where the network takes any size")
    parser.add_argument("names", nargs="*", default=ARCHITECTURES, help="timm names; the list in this file if none")
    options = parser.parse_args()
    rows = []
    for name in options.names:
        rows.append(sweep(name, options.side))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    (options.out / "sweep.md").write_text(table(rows), encoding="utf-8")
    wrong = [row["architecture"] for row in rows if not max(row["hard"], row["soft"]) <= TOLERANCE]
    if wrong:
        raise SystemExit(f"logits differ by more than {TOLERANCE:g}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
