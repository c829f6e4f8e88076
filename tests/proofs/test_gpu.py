"""All models on a GPU against the CPU."""

import pytest
import timm
import torch
from torch import Tensor, nn

import sa_zoo  # noqa: F401  registers the names

# Largest relative difference of logits, and of all gradients, from float32 on a CPU
LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.05, 0.3)}


def outputs(network: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Logits and all gradients, in float32 without TF32, or under autocast to another type."""
    network.zero_grad()
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32),
    ):
        logits = network(x).float()
        logits.square().mean().backward()
    gradients = [parameter.grad.flatten() for parameter in network.parameters()]
    return [logits.detach().cpu(), torch.cat(gradients).cpu()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", timm.list_models("*_cifar"))
def test_a_model_computes_on_a_gpu_what_it_computes_on_a_cpu(name):
    torch.manual_seed(0)
    network = timm.create_model(name).train()
    x = torch.randn(7, 3, 32, 32)
    expected = outputs(network, x, torch.float32)
    network.cuda()
    for dtype, limits in LIMITS.items():
        for got, want, limit in zip(
            outputs(network, x.cuda(), dtype), expected, limits, strict=True
        ):
            assert (got - want).norm() <= limit * want.norm(), dtype
