import numpy as np
import pytest
import timm
import torch
from torch import nn

import sa_zoo  # noqa: F401  registers its names with timm
from sa_zoo.data.input_format import input_format_of
from sa_zoo.data.splits import Split
from sa_zoo.training.config import parse_config
from sa_zoo.training.whitening import whiten_first_convolution


def correlated_images(n: int, size: int) -> torch.Tensor:
    """Noise of full contrast whose neighboring pixels are alike, as uint8 (n, 3, size, size)."""
    noise = torch.randn(n, 3, size + 2, size + 2, generator=torch.Generator().manual_seed(0))
    return (nn.functional.avg_pool2d(noise, 3, stride=1) * 128 + 128).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize(
    ("model", "arguments", "new"),
    [
        # 12 eigenvectors and their negatives, where there is room
        ("sa_quadratic_tiny_cifar", {"patch_size": 2, "embed_dim": 29}, 24),
        ("sa_quadratic_tiny_cifar", {"patch_size": 2, "embed_dim": 17}, 17),
        ("resnet_tiny_cifar", {}, 54),
    ],
)
def test_whitened_outputs_are_uncorrelated_and_of_variance_one(model, arguments, new):
    network = timm.create_model(model, **arguments)
    conv = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    before = conv.weight.detach().clone()
    images = correlated_images(101, 6 * conv.kernel_size[0])
    input_format = input_format_of(network)
    whiten_first_convolution(network, Split(images, np.zeros(101, np.int64), input_format))
    assert torch.equal(conv.weight[new:], before[new:])
    x = input_format.normalize(images)
    whole = nn.functional.conv2d(x, conv.weight, stride=conv.kernel_size)
    half = min(new, before[0].numel())  # an eigenvector each
    covariance = whole.transpose(0, 1).flatten(1).double().cov().detach()[:half, :half]
    variances = covariance.diag()
    assert variances[0] == pytest.approx(1, abs=0.05)
    assert variances.max() <= 1.0001
    assert (covariance - variances.diag()).abs().max() < 1e-4
    assert torch.allclose(conv.weight[half:new], -conv.weight[: new - half])


def test_trained_weights_and_attention_are_not_whitened():
    for start in ({"whiten": True}, {"kernels": 1}):
        model = {"name": "a", "init": "local-dir:x"} | start
        with pytest.raises(ValueError, match=r"model.kernels: got a start with model.init"):
            parse_config({"model": model, "train": {"epochs": 1}})
    network = timm.create_model("mhsa_resnet_tiny_cifar")
    split = Split(correlated_images(3, 32), np.zeros(3, np.int64), input_format_of(network))
    with pytest.raises(ValueError, match=r"model.whiten: got a model with first_conv"):
        whiten_first_convolution(network, split)
