"""What one image costs a model: parameters, multiply-adds, activations, counted while the model runs."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry


@dataclass(frozen=True)
class Cost:
    """Counts for one image; a multiply-add (MAC) is two floating-point operations.

    linear_macs: in nn.Linear layers alone, which is how the paper counts (its FLOPs are twice that).
    macs: in every matrix product and convolution of the evaluation, attention's included.
    activations: elements that those products and convolutions write.
    """

    parameters: int
    linear_macs: int
    macs: int
    activations: int


def cost_of(model: nn.Module, input_size: tuple[int, int, int]) -> Cost:
    """Run `model` once in evaluation mode on one image (C, H, W).

    A network that can be evaluated by its definition is counted so: the same on every device, and what papers count.
    """
    model.eval()
    model = model.explicit() if hasattr(model, "explicit") else model
    image = torch.zeros(1, *input_size)
    elements = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(flop_registry, _elements_written))
    with torch.no_grad(), FlopCounterMode(display=False) as flops, elements:
        linear_macs = _linear_macs(model, image)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_macs=linear_macs,
        macs=flops.get_total_flops() // 2,
        activations=elements.get_total_flops(),
    )


def training_macs(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Multiply-adds in products and convolutions that the forward pass of one training image (C, H, W) executes."""
    model = copy.deepcopy(model).train()
    images = torch.zeros(2, *input_size, device=next(model.parameters()).device)  # batch norm needs more than one
    with FlopCounterMode(display=False) as flops:
        model(images)
    return flops.get_total_flops() // (2 * len(images))


def _elements_written(*args, out_shape, **kwargs) -> int:
    # Fused attention returns its output first, then what only the backward pass reads.
    return math.prod(out_shape if isinstance(out_shape, torch.Size) else out_shape[0])


def _linear_macs(model: nn.Module, image: torch.Tensor) -> int:
    counts: list[int] = []
    hooks = [
        module.register_forward_hook(lambda layer, _, output: counts.append(output.numel() * layer.in_features))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        model(image)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts)
