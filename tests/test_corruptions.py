"""training/corruptions.py: each corruption against its definition, and evaluation on corrupted images."""

from io import BytesIO

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.v2.functional import adjust_brightness, affine, gaussian_blur

import sa_zoo.training.corruptions as made
from sa_zoo.training.corruptions import STRENGTHS, CorruptedSplit
from sa_zoo.training.model import InputFormat
from sa_zoo.training.splits import Split

H, W = 29, 37
FORMAT = InputFormat((3, H, W), (), (), "", 1.0)
BACKGROUND = np.array([0.2, 0.5, 0.7])


def image(channels=3):
    return np.random.default_rng(1).random((H, W, channels))


def smooth():
    """An image without fine structure."""
    waves = np.sin(np.arange(H) / 5)[:, None] * np.cos(np.arange(W) / 7)
    return (0.5 + 0.3 * waves)[:, :, None] * BACKGROUND


def corrupted(name, x, *strength):
    return getattr(made, name)(x, np.random.default_rng(0), *strength)


def chw(x):
    return torch.from_numpy(x).permute(2, 0, 1)


def test_every_corruption_has_five_strengths_and_takes_any_image():
    assert len(STRENGTHS) == 15
    for name, strengths in STRENGTHS.items():
        assert len(strengths) == 5
        changes = []
        for strength in strengths:
            for x in (image(), image(1)):
                found = corrupted(name, x, *strength)
                assert found.shape == x.shape and np.isfinite(found).all()
            x = smooth()
            changes.append(np.abs(corrupted(name, x, *strength).clip(0, 1) - x).mean())
        assert min(changes) > 0
        assert changes[4] > changes[0] or name == "elastic_transform"


def test_noise_has_its_distribution():
    gray = np.full((211, 223, 3), 0.4)
    assert corrupted("gaussian_noise", gray, 0.08).std() == pytest.approx(0.08, rel=0.01)
    photons = 60 * corrupted("shot_noise", gray, 60)
    assert photons.mean() == pytest.approx(24, rel=0.01)
    assert photons.var() == pytest.approx(24, rel=0.02)  # as Poisson's
    found = corrupted("impulse_noise", gray, 0.05)
    shares = [(found == value).mean() for value in (0.0, 0.4, 1.0)]
    assert shares == pytest.approx([0.025, 0.95, 0.025], abs=0.002)


def test_blurs_are_those_of_torch():
    x = image()
    cross = torch.tensor([[0.0, 1, 0], [1, 1, 1], [0, 1, 0]]).double() / 5
    blurred = gaussian_blur(F.pad(cross, [2] * 4)[None], [3, 3], [0.2, 0.2])[0]
    padded = F.pad(chw(x)[:, None], [3] * 4, mode="reflect")
    expected = F.conv2d(padded, blurred[None, None])[:, 0]
    assert torch.allclose(chw(corrupted("defocus_blur", x, 1, 0.2)), expected, atol=1e-12)
    step = np.zeros((H, W, 1))
    step[:, 20] = 1.0
    (row,) = np.unique(made.trailed(step, 6, 2.0, 0.0)[:, :, 0], axis=0)
    weights = np.exp(-(np.arange(13) ** 2) / 8)
    assert np.allclose(row[20:7:-1], weights / weights.sum())  # a pixel sees what is to its right
    zoomed = made.zoomed(smooth(), 1.2)
    expected = affine(chw(smooth())[None], 0.0, [0, 0], 1.2, [0.0, 0.0], "bilinear")[0]
    assert torch.allclose(chw(zoomed), expected, atol=0.01)


def test_glass_moves_pixels_to_the_right_and_downwards():
    x = image()
    found = corrupted("glass_blur", x, 1e-3, 1)
    around = [np.roll(x, (down, right), (0, 1)) for down in (0, 1) for right in (0, 1)]
    same = np.array([np.isclose(found, each).all(2)[1:, 1:] for each in around])
    assert same.any(0).all()
    assert same.mean((1, 2)) == pytest.approx([0.25] * 4, abs=0.05)


def test_colors_change_as_in_torchvision():
    x = 0.2 + 0.5 * image()
    assert np.allclose(corrupted("brightness", x, 0.1).max(2), (x.max(2) + 0.1).clip(0, 1))
    doubled = corrupted("brightness", 0.4 * np.ones((H, W, 3)) * BACKGROUND, 0.28)
    expected = adjust_brightness(chw(0.4 * np.ones((H, W, 3)) * BACKGROUND), 2.0)
    assert torch.allclose(chw(doubled), expected)
    found = corrupted("contrast", x, 0.3)
    assert np.allclose(found.mean((0, 1)), x.mean((0, 1)))
    assert np.allclose(found.std((0, 1)), 0.3 * x.std((0, 1)))


def test_weather_lies_above_the_image():
    x = smooth()
    fog = corrupted("fog", x, 0.5, 2.0)
    clouds = (fog * (x.max() + 0.5) / x.max() - x) / 0.5
    assert np.ptp(clouds, axis=2).max() < 1e-12  # gray
    assert (clouds.min(), clouds.max()) == pytest.approx((0.0, 1.0), abs=1e-12)
    rough, fine = (corrupted("clouds", np.zeros((97, 89, 1)), decay) for decay in (1.2, 3.0))
    neighbors = [np.abs(np.diff(each, axis=0)).mean() for each in (rough, fine)]
    assert neighbors[0] > 2 * neighbors[1]
    assert (corrupted("frost", x, 0.9, 0.4) >= 0.9 * x - 1e-12).all()
    assert (corrupted("snow", x, 0.1, 0.2, 1, 0.6, 8, 3, 0.95) >= x - 1e-12).all()
    flakes = corrupted("snow", 0 * x, 0.1, 0.2, 1, 0.6, 8, 3, 1)
    assert np.allclose(flakes, flakes[::-1, ::-1]) and flakes.max() > 0  # fall both ways


def test_elastic_transforms_move_pixels_little():
    x = smooth()
    assert np.allclose(corrupted("elastic_transform", x, 0, 0, 0), x)
    for strength in STRENGTHS["elastic_transform"]:
        assert 0 < np.abs(corrupted("elastic_transform", x, *strength) - x).max() < 0.3


def test_pixels_and_jpeg_are_those_of_pillow():
    x = np.uint8(255 * image())
    file = BytesIO()
    Image.fromarray(x).save(file, "JPEG", quality=58)
    expected = np.asarray(Image.open(file)) / 255
    assert np.array_equal(corrupted("jpeg_compression", x / 255, 58), expected)
    coarse = corrupted("pixelate", x / 255, 0.5)
    assert len(np.unique(coarse.reshape(-1, 3), axis=0)) == (H // 2) * (W // 2)


def test_equal_images_have_their_own_noise():
    equal = Split(torch.full((2, 3, H, W), 99).byte(), np.arange(2), FORMAT)
    (images, _, _), *_ = CorruptedSplit(equal, "gaussian_noise", 4).loader(2)
    assert not torch.equal(*images)


@pytest.mark.parametrize("name", STRENGTHS)
def test_images_are_the_same_in_every_batch(name):
    pixels = np.uint8(255 * np.random.default_rng(2).random((7, 3, H, W)))
    whole = Split(torch.from_numpy(pixels), np.arange(7), FORMAT)
    split = CorruptedSplit(whole, name, 2)
    read = []
    for size in (7, 3, 2):
        parts = zip(*split.loader(size), strict=True)
        read.append([torch.cat(part) for part in parts])
    images, labels, positions = zip(*read, strict=True)
    assert all(torch.equal(images[0], each) for each in images[1:])
    assert torch.equal(labels[0], positions[0])
    assert images[0].dtype == torch.uint8 and not torch.equal(images[0], whole.images)
