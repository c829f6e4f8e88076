"""The corruptions of CIFAR-10-C, at its five strengths (Hendrycks and Dietterich 2019, arXiv:1903.12261).

Each is a function of an image x (H, W, C) from 0 to 1, a generator of random numbers and a strength in
corruptions.toml, in pixels of 32x32 images. They are written anew, so they differ from the published images in their
random numbers and details; frost, for which photographs were used, is drawn like fog.
"""

import tomllib
from importlib.resources import files
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import convolve, gaussian_filter, map_coordinates
from torch import Tensor

from sa_zoo.training.splits import Split

STRENGTHS = tomllib.loads(files(__package__).joinpath("corruptions.toml").read_text())
Array = np.ndarray
Random = np.random.Generator


def gaussian_noise(x: Array, random: Random, std: float) -> Array:
    return random.normal(x, std)


def shot_noise(x: Array, random: Random, photons: float) -> Array:
    return random.poisson(x * photons) / photons


def impulse_noise(x: Array, random: Random, share: float) -> Array:
    drawn = random.random(x.shape)
    return np.where(drawn < share, drawn < share / 2, x)


def defocus_blur(x: Array, random: Random, radius: float, sigma: float) -> Array:
    y = np.arange(-3, 4)
    disk = (np.hypot.outer(y, y) <= radius).astype(float)
    kernel = gaussian_filter(disk / disk.sum(), sigma, radius=1)
    return convolve(x, kernel[:, :, None], mode="mirror")


def glass_blur(x: Array, random: Random, sigma: float, rounds: int) -> Array:
    """Each pixel takes the color of itself or of one above or to the left, several times."""
    x = gaussian_filter(x, (sigma, sigma, 0))
    places = np.indices(x.shape[:2])
    for _ in range(rounds):
        rows, columns = np.maximum(places - random.integers(0, 2, places.shape), 0)
        x = x[rows, columns]
    return gaussian_filter(x, (sigma, sigma, 0))


def motion_blur(x: Array, random: Random, radius: int, sigma: float) -> Array:
    return trailed(x, radius, sigma, random.uniform(-45, 45))


def zoom_blur(x: Array, random: Random, steps: int) -> Array:
    return np.mean([x, *(zoomed(x, 1 + step / 100) for step in range(steps))], axis=0)


def snow(
    x: Array,
    random: Random,
    mean: float,
    std: float,
    zoom: float,
    least: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Array:
    flakes = zoomed(random.normal(mean, std, (*x.shape[:2], 1)), zoom)
    flakes = trailed(flakes * (flakes >= least), radius, sigma, random.uniform(-135, -45))
    white = np.maximum(x, 1.5 * x.mean(axis=2, keepdims=True) + 0.5)
    return keep * x + (1 - keep) * white + flakes + flakes[::-1, ::-1]


def frost(x: Array, random: Random, keep: float, amount: float) -> Array:
    return keep * x + amount * clouds(x, random, 1.75)


def fog(x: Array, random: Random, amount: float, decay: float) -> Array:
    return (x + amount * clouds(x, random, decay)) * x.max() / (x.max() + amount)


def brightness(x: Array, random: Random, more: float) -> Array:
    """Raises the value of hue, saturation and value."""
    value = np.maximum(x.max(axis=2, keepdims=True), 1e-9)
    return np.maximum(x, 1e-9) / value * np.minimum(value + more, 1)


def contrast(x: Array, random: Random, factor: float) -> Array:
    mean = x.mean(axis=(0, 1))
    return mean + factor * (x - mean)


def elastic_transform(x: Array, random: Random, alpha: float, sigma: float, affine: float) -> Array:
    """A random linear map that moves the corners of a square by about `affine`, and a smooth field of up to `alpha`."""
    middle = np.array(x.shape[:2])[:, None, None] // 2
    linear = np.eye(2) + random.uniform(-affine, affine, (2, 2)) / middle.min()
    places = np.indices(x.shape[:2]) - middle
    field = gaussian_filter(random.uniform(-1, 1, places.shape), (0, sigma, sigma))
    places = np.tensordot(linear, places + alpha * field, 1) + middle
    return np.stack([map_coordinates(c, places, order=1, mode="mirror") for c in x.T.mT], axis=2)


def pixelate(x: Array, random: Random, share: float) -> Array:
    image = as_image(x)
    small = image.resize([int(share * size) for size in image.size], Image.Resampling.BOX)
    return as_array(small.resize(image.size, Image.Resampling.BOX))


def jpeg_compression(x: Array, random: Random, quality: int) -> Array:
    file = BytesIO()
    as_image(x).save(file, "JPEG", quality=quality)
    return as_array(Image.open(file))


def trailed(x: Array, radius: int, sigma: float, degrees: float) -> Array:
    """The mean along a line that begins at each pixel, with the weights of half a Gaussian."""
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    angle = np.deg2rad(degrees)
    down, across = (np.rint(steps * along).astype(int) for along in (np.sin(angle), np.cos(angle)))
    rows = (np.arange(x.shape[0]) + down[:, None]).clip(0, x.shape[0] - 1)
    columns = (np.arange(x.shape[1]) + across[:, None]).clip(0, x.shape[1] - 1)
    lines = x[rows[:, :, None], columns[:, None]]  # (steps, H, W, C)
    return np.tensordot(weights / weights.sum(), lines, 1)


def zoomed(x: Array, factor: float) -> Array:
    """The middle of an image, enlarged to its size."""
    for axis in (0, 1):
        pixels = np.arange(x.shape[axis])
        places = pixels.mean() + (pixels - pixels.mean()) / factor
        weights = np.maximum(1 - np.abs(np.subtract.outer(places, pixels)), 0)
        x = np.moveaxis(np.tensordot(weights, x, (1, axis)), 0, axis)
    return x


def clouds(x: Array, random: Random, decay: float) -> Array:
    """Noise from 0 to 1 whose amplitude falls by decay^2 from octave to octave: (H, W, 1)"""
    height, width = x.shape[:2]
    frequency = np.hypot.outer(np.fft.fftfreq(height), np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf
    noise = np.fft.rfft2(random.normal(size=(height, width)))
    drawn = np.fft.irfft2(noise / frequency ** (1 + 2 * np.log2(decay)), (height, width))
    return ((drawn - drawn.min()) / np.ptp(drawn))[:, :, None]


def as_image(x: Array) -> Image.Image:
    return Image.fromarray(np.uint8(255 * x).squeeze())


def as_array(image: Image.Image) -> Array:
    return np.atleast_3d(np.asarray(image)) / 255


class CorruptedSplit(Split):
    """The images of a split, corrupted when they are read: an image is the same in all batches and processes.

    Args:
        name: a key of STRENGTHS.
        strength: number of its strength, from 0.
    """

    def __init__(self, split: Split, name: str, strength: int) -> None:
        self.split = split
        self.labels = split.labels
        self.input_format = split.input_format
        self.workers = split.workers
        self.name = name
        self.strength = strength

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        images, labels, positions = self.split.__getitems__(indices)
        whole = images.permute(0, 2, 3, 1).numpy(force=True)
        found = np.stack([self.corrupted(*pair) for pair in zip(whole, indices, strict=True)])
        return torch.from_numpy(found).permute(0, 3, 1, 2).to(images.device), labels, positions

    def corrupted(self, image: Array, index: int) -> Array:
        """An image (H, W, C) of uint8, with the random numbers of its index."""
        random = np.random.default_rng([index, self.strength])
        x = globals()[self.name](image / 255, random, *STRENGTHS[self.name][self.strength])
        return (255 * x.clip(0, 1)).astype(np.uint8)
