"""Measures of heads: against NumPy in float64, pixel by pixel, and heads that were planted."""

import numpy as np
import pytest
import torch
from numpy_sanet import learned, pixels, softmax
from small_networks import KERNEL, convolutional_network, pictures, small_network
from timm.utils import reparameterize_model

import sa_zoo
from sa_zoo.analysis.heads import layers_of, measure

H, W = 7, 5


def by_loops(P, window):
    """share, reach, center (N_h,) and overlap (N_h, N_h) of maps (N_h, T, T), from the definitions."""
    places, inner = pixels(H, W), 0
    share, reach, center = np.zeros(len(P)), np.zeros(len(P)), np.zeros((len(P), 2))
    for q, (y, x) in enumerate(places):
        far_from_border = H // 4 <= y < H - H // 4 and W // 4 <= x < W - W // 4
        inner += far_from_border
        for k, (i, j) in enumerate(places):
            delta = np.array([i - y, j - x])
            share += P[:, q, k] * (abs(delta).max() <= window // 2) / len(places)
            reach += P[:, q, k] * np.hypot(*delta) / len(places)
            center += far_from_border * np.outer(P[:, q, k], delta)
    overlap = np.array([[np.minimum(one, other).sum(-1).mean() for other in P] for one in P])
    return share, reach, center / inner, overlap


@pytest.mark.parametrize("window", [1, 3, 5])
def test_measures_of_a_learned_model_are_the_definitions(window):
    model = small_network("learned")
    parameters = model.blocks[1].attn.terms[0].double().state_dict()
    term = {name: value.numpy() for name, value in parameters.items()}
    P = softmax(learned(term, np.zeros((1, H, W, 1))))
    share, reach, center, overlap = by_loops(P, window)
    heads = measure(layers_of(model.float(), pictures(1))[1], window)
    np.fill_diagonal(overlap, -1)
    assert heads.share.numpy() == pytest.approx(share, abs=1e-6)
    assert heads.reach.numpy() == pytest.approx(reach, abs=1e-5)
    assert heads.center.numpy() == pytest.approx(center, abs=1e-5)
    assert heads.twin.tolist() == overlap.argmax(1).tolist()
    assert heads.overlap.numpy() == pytest.approx(overlap.max(1), abs=1e-6)
    assert heads.alpha is heads.condition is None
    assert heads.variation.tolist() == [0] * 5


def test_maps_of_a_content_model_are_averaged_over_images():
    model, x = small_network("content"), pictures(19)
    P = model.attention_maps(x)[1].detach().double().numpy()  # (19, N_h, T, T)
    layer = layers_of(model, x)[1]
    assert layer.maps.numpy() == pytest.approx(P.mean(0), abs=1e-6)
    moved = 0.5 * np.abs(P - P.mean(0)).sum(-1).mean((0, 2))
    assert measure(layer).variation.numpy() == pytest.approx(moved, abs=1e-6)
    assert moved.min() > 0.001


@pytest.mark.parametrize("alpha", [72.0, 2048.0])
def test_planted_heads_are_described_as_they_are(alpha):
    network = convolutional_network()
    if alpha > 100:  # deployed as taps
        sa_zoo.harden(network)
        network = reparameterize_model(network)
    layer = layers_of(network, torch.zeros(1, 3, 16, 16))[0]
    heads = measure(layer, window=3)
    assert [tuple(center) for center in heads.center.tolist()] == KERNEL
    assert heads.alpha.tolist() == pytest.approx([alpha] * 9)
    assert heads.condition.tolist() == pytest.approx([1.0] * 9)
    assert heads.share.tolist() == pytest.approx([1.0] * 9)
    assert heads.distance.max() < 1e-9
    beyond_the_window = measure(layer, window=1).distance > 0.9
    assert beyond_the_window.tolist() == [shift != (0, 0) for shift in KERNEL]


def test_a_tilted_head_has_the_sharpness_of_its_eigenvalues():
    model = small_network("quadratic_gen")
    S = np.array([[1.3, 0.4], [-0.2, 0.7]])
    model.blocks[0].attn.terms[0].spread.data[1] = torch.from_numpy(S)
    heads = measure(layers_of(model, pictures(1))[0])
    small, large = np.linalg.eigvalsh(S @ S.T)
    assert heads.alpha[1].item() == pytest.approx((small + large) / 4, rel=1e-5)
    assert heads.condition[1].item() == pytest.approx(large / small, rel=1e-5)
