"""study_sizes.py: heads that are scaled with the image cover the same part of it."""

import timm
import torch
from study_sizes import Resized, scaled

from sa_zoo.models.network import terms_in

RATIO = 3


def test_scaled_heads_score_the_same_places_of_a_larger_image():
    torch.manual_seed(0)
    sizes = {"embed_dim": (7, 5, 11), "num_heads": 2}
    network = timm.create_model("sa_pyramid_tiny_cifar", **sizes)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    larger = terms_in(scaled(network, RATIO))
    for name, term in terms_in(network).items():
        for small, large in zip(
            term.axis_scores(5, 7), larger[name].axis_scores(5 * RATIO, 7 * RATIO), strict=True
        ):
            # scores are of displacements, up to what all keys of a query have in common
            small = small - small[..., :1]
            every_third = large[:, ::RATIO, ::RATIO]
            assert torch.allclose(every_third - every_third[..., :1], small, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_images_are_resized_before_the_network_sees_them():
    images = torch.randn(2, 3, 32, 32)
    assert Resized(torch.nn.Identity(), 48)(images).shape == (2, 3, 48, 48)
