"""Networks of many kinds as attention; `--times 99 --record docs` writes docs/conversions.json."""

import json

import pytest
import timm
import torch
from torch import nn

from sa_zoo.convolution.network_conversion import convert

# The deepest EfficientNets are not in the list: with random weights they are chaotic, so that even the CNN's own
# logits in float32 and in float64 have little in common.
ARCHITECTURES = """
resnet18 resnet50 resnet50d resnext50_32x4d wide_resnet50_2 seresnet50 skresnet18 res2net50_26w_4s resnest14d
resnetblur50 vgg11_bn vgg13 densenet121 dpn68 inception_v3 inception_v4 xception41 darknet53 cspdarknet53
hrnet_w18_small dla34 ese_vovnet19b_dw selecsls42b repvgg_a0 mobileone_s0 regnetx_002 regnety_002 mnasnet_100
mobilenetv2_100 mobilenetv3_small_100 mobilenetv4_conv_small efficientnet_b0 tf_efficientnet_b0 tf_efficientnetv2_b0
tf_mixnet_s ghostnet_100 rexnet_100 convnext_atto convnextv2_atto fasternet_t0 hgnetv2_b0 starnet_s1
edgenext_xx_small mobilevit_xxs coat_tiny
"""
TOLERANCE = 1e-4  # of the largest logit, in float32
SIDE = 96  # of images, where the network takes any size


def randomize(network: nn.Module) -> None:
    """Batch norms as after training: no statistic, scale or shift is left at its initial value."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.1)


@pytest.mark.filterwarnings("ignore")  # of timm, for some architectures
def test_conversions(proof, request):
    """Convert networks with random weights and random batch-norm statistics, and compare logits: at alpha 46, where
    layers run as convolutions, and at alpha 20, where they run as attention."""
    if not proof.times:
        pytest.skip("--times is a number of networks; tests/test_network_conversion.py tries a few")
    rows = []
    for name in ARCHITECTURES.split()[: proof.times]:
        torch.manual_seed(0)
        network = timm.create_model(name).eval()
        randomize(network)
        channels, *size = network.pretrained_cfg["input_size"]
        if not network.pretrained_cfg.get("fixed_input_size"):
            size = [min(SIDE, length) for length in size]
        example = torch.randn(2, channels, *size)
        _, hard = convert(network, alpha=46.0, example=example)
        _, soft = convert(network, alpha=20.0, example=example)
        heads = sum(layer.heads for layer in hard.layers)
        counts = {"layers": len(hard.layers), "heads": heads, "left": len(hard.skipped)}
        rows.append({"architecture": name, **counts, "hard": hard.logits, "soft": soft.logits})
        lost = not max(hard.logits, soft.logits) <= TOLERANCE
        proof.tried(name, "equal logits", lost and rows[-1])
    folder = request.config.getoption("record")
    if folder:
        conditions = {"weights": "random, with random batch-norm statistics", "type": "float32"}
        conditions |= {"torch": torch.__version__, "timm": timm.__version__}
        found = {"conditions": conditions, "rows": rows}
        (folder / "conversions.json").write_text(json.dumps(found, indent=2) + "\n")
