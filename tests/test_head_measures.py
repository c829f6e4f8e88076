"""Measures of heads: against NumPy in float64, pixel by pixel, and heads that were planted."""

import math
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from numpy_sanet import learned, pixels, softmax
from planted import KERNEL, convolutional_network

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.heads import layers_of, measure, table

H, W = 5, 7
SIZES = {
    "img_size": (10, 14),
    "patch_size": 2,
    "embed_dim": 11,
    "depth": 2,
    "hidden_dim": 13,
    "num_heads": 3,
}


def images(count=1):
    return torch.randn(count, 3, 10, 14, generator=torch.Generator().manual_seed(0))


def by_loops(P, window):
    """share, reach, center (N_h,) and overlap (N_h, N_h) of maps (N_h, T, T), from the definitions."""
    places, heads = pixels(H, W), range(len(P))
    share, reach, center = np.zeros(len(P)), np.zeros(len(P)), np.zeros((len(P), 2))
    inner = [(y, x) for y, x in places if H // 4 <= y < H - H // 4 and W // 4 <= x < W - W // 4]
    for h in heads:
        for q, (y, x) in enumerate(places):
            for k, (i, j) in enumerate(places):
                near = max(abs(i - y), abs(j - x)) <= window // 2
                share[h] += P[h, q, k] * near / len(places)
                reach[h] += P[h, q, k] * math.hypot(i - y, j - x) / len(places)
                if (y, x) in inner:
                    center[h] += P[h, q, k] * np.array([i - y, j - x]) / len(inner)
    overlap = np.array([[np.minimum(P[g], P[h]).sum(-1).mean() for g in heads] for h in heads])
    return share, reach, center, overlap


@pytest.mark.parametrize("window", [1, 3, 5])
def test_measures_of_a_learned_model_are_those_of_the_definitions(window):
    torch.manual_seed(0)
    model = timm.create_model("sa_learned_tiny_cifar", **SIZES)
    term = {
        name: value.detach().double().numpy()
        for name, value in model.blocks[1].attn.terms[0].named_parameters()
    }
    share, reach, center, overlap = by_loops(softmax(learned(term, np.zeros((1, H, W, 1)))), window)
    heads = measure(layers_of(model, images())[1], window)
    np.fill_diagonal(overlap, -1)
    assert heads.share.numpy() == pytest.approx(share, abs=1e-6)
    assert heads.reach.numpy() == pytest.approx(reach, abs=1e-5)
    assert heads.center.numpy() == pytest.approx(center, abs=1e-5)
    assert heads.twin.tolist() == overlap.argmax(1).tolist()
    assert heads.overlap.numpy() == pytest.approx(overlap.max(1), abs=1e-6)
    assert heads.alpha is heads.condition is None
    assert heads.variation.tolist() == [0] * 3


def test_the_maps_of_a_content_model_are_averaged_and_what_images_move_is_counted():
    torch.manual_seed(0)
    model, x = timm.create_model("sa_content_tiny_cifar", **SIZES).eval(), images(7)
    P = model.attention_maps(x)[1].detach().double().numpy()  # (7, N_h, T, T)
    layer = layers_of(model, x)[1]
    assert layer.maps.numpy() == pytest.approx(P.mean(0), abs=1e-6)
    moved = 0.5 * np.abs(P - P.mean(0)).sum(-1).mean((0, 2))
    assert measure(layer).variation.numpy() == pytest.approx(moved, abs=1e-6)
    assert moved.min() > 0.01


def test_planted_heads_are_described_as_they_are():
    heads = measure(layers_of(convolutional_network(), torch.zeros(1, 3, 16, 16))[0], window=3)
    assert [tuple(center) for center in heads.center.tolist()] == KERNEL
    assert heads.alpha.tolist() == pytest.approx([72.0] * 9)
    assert heads.condition.tolist() == pytest.approx([1.0] * 9)
    assert heads.share.tolist() == pytest.approx([1.0] * 9, abs=1e-9)
    assert (heads.distance < 1e-9).all()
    assert heads.reach[4] < 1e-9 and heads.overlap[4] < 0.2


def test_the_distance_of_heads_beyond_the_window_is_large():
    heads = measure(layers_of(convolutional_network(), torch.zeros(1, 3, 16, 16))[0], window=1)
    assert (heads.distance > 0.9).tolist() == [shift != (0, 0) for shift in KERNEL]


def test_the_sharpness_and_condition_of_a_head_with_any_covariance_are_those_of_its_eigenvalues():
    model = timm.create_model("sa_quadratic_gen_cifar", **SIZES)
    S = np.array([[1.3, 0.4], [-0.2, 0.7]])
    model.blocks[0].attn.terms[0].spread.data[1] = torch.from_numpy(S)
    heads = measure(layers_of(model, images())[0])
    small, large = np.linalg.eigvalsh(S @ S.T)
    assert heads.alpha[1].item() == pytest.approx((small + large) / 4, rel=1e-5)
    assert heads.condition[1].item() == pytest.approx(large / small, rel=1e-5)


def test_a_vision_transformer_that_attends_everywhere_is_no_convolution():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=(80, 112), num_classes=0)  # 5 x 7 patches of 16
    for block in model.blocks:
        block.attn.qkv.weight.data.zero_()
    layers = layers_of(model, torch.randn(2, 3, 80, 112))
    assert [layer.grid for layer in layers] == [(H, W)] * len(model.blocks)
    P = np.full((1, H * W, H * W), 1 / (H * W))
    heads = measure(layers[0])
    assert heads.share[0].item() == pytest.approx(by_loops(P, 3)[0][0], abs=1e-6)
    assert heads.variation[0].item() == pytest.approx(0, abs=1e-6)
    assert heads.overlap[0].item() == pytest.approx(1, abs=1e-6)
    assert heads.distance[0] > 0.7


def test_the_table_has_a_line_per_head_and_their_mean_per_layer():
    layers = layers_of(convolutional_network(), torch.zeros(1, 3, 16, 16))
    share = torch.arange(9, dtype=torch.float64) / 8
    lines = table([replace(measure(layer), share=share) for layer in layers], 3).splitlines()
    assert len(lines) == 2 + 2 * (9 + 1) and len({line.count("|") for line in lines}) == 1
    assert "| -1.00, +1.00 | tap | 1 | 25.0% |" in lines[2 + 2]
    assert [line for line in lines if "mean" in line] == [lines[2 + 9], lines[2 + 9 + 10]]
    assert lines[2 + 9].startswith("| blocks.0.attn | mean |  |  |  | 50.0% |")
