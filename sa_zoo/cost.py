"""The cost of one image in a model: parameters, and the multiply-adds of a run."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from sa_zoo.convolution.convolutional import ConvolutionalAttention, HardAttention
from sa_zoo.convolution.layer_conversion import TRANSPOSED
from sa_zoo.convolution.values import ValueMatrices
from sa_zoo.fast.route import only

# Layers that apply `weight` (D_out, ..) once per output position, among them attention made of a convolution.
# Transposed convolutions apply theirs (D_in, ..) once per input position.
WEIGHTED = (nn.Linear, _ConvNd, ConvolutionalAttention)
# torch 2.11 has no formula for it.
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        sdpa_flop_count(q, k, v)
    )
}


@dataclass(frozen=True)
class Cost:
    """Counts for one image; a multiply-add (MAC) is two floating-point operations."""

    parameters: int
    # in linear layers and convolutions, without the products of attention probabilities
    linear_macs: int
    # in every matrix product and convolution of the definition, including those of attention
    macs: int


def cost_of(model: nn.Module, input_size: tuple[int, int, int]) -> Cost:
    """Run a copy of `model` once in evaluation mode on one image (C, H, W).

    Attention is evaluated by its definition: the result does not depend on the device, and is comparable with papers.
    """
    linear_macs = 0

    def count_linear(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal linear_macs
        if isinstance(layer, WEIGHTED) and not isinstance(layer, ValueMatrices):
            met = inputs[0] if isinstance(layer, TRANSPOSED) else output
            linear_macs += met.numel() // len(layer.weight) * layer.weight.numel()

    model = copy.deepcopy(model).eval()
    flops = FlopCounterMode(display=False, custom_mapping=FUSED)
    hook = register_module_forward_hook(count_linear)
    with torch.no_grad(), only("definition"), flops, hook:
        model(torch.zeros(1, *input_size, device=next(model.parameters()).device))
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_macs=linear_macs,
        macs=flops.get_total_flops() // 2,
    )


def training_macs(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Multiply-adds per image (C, H, W) in the forward pass of training, measured on two images."""
    model = copy.deepcopy(model).train()
    # batch norm needs more than one image
    images = torch.zeros(2, *input_size, device=next(model.parameters()).device)
    with FlopCounterMode(display=False, custom_mapping=FUSED) as flops:
        model(images)
    return flops.get_total_flops() // (2 * len(images))


def cost_of_softness(model: nn.Module, input_size: tuple[int, int, int]) -> str:
    """A line on the work of a converted network with layers that run as attention; empty if there are none."""
    converted = [layer for layer in model.modules() if isinstance(layer, ConvolutionalAttention)]
    soft = [layer for layer in converted if not isinstance(layer, HardAttention)]
    if not soft:
        return ""
    cost = cost_of(model, input_size)
    return (
        f"{len(soft)} layers of soft attention: {cost.macs / 1e9:.3g} GMACs per image, "
        f"{cost.linear_macs / 1e9:.3g} as convolutions"
    )
