"""Matrix products and work in portions: how a CPU evaluates what attention.py defines.

torch hands a CPU's float32 products to MKL, which on other processors than Intel's leaves half the width of their
vectors unused, and its convolutions to oneDNN, which uses all of it. A product is a 1x1 convolution; said so, it takes
half the time on an AMD EPYC with AVX-512 (`sa-zoo bench` measures both ceilings). Graphs that are compiled or exported,
other devices and other types keep torch's own products.
"""

import math
import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.functional import linear as torch_linear
from torch.utils.checkpoint import checkpoint

ONEDNN = torch.backends.mkldnn.is_available()
# From so many images on, torch hands 1x1 convolutions to oneDNN on any number of threads.
IMAGES = 16
# From so many rows on it is worth that oneDNN lays out the weight anew in each call.
ROWS = 128
# From so many images on that holds for a sum over heads in bfloat16.
BFLOAT16_IMAGES = 4
# Multiply-adds beside which the time of a call is nothing.
CALL = 2**24
# Numbers in the images that a layer looks at together (four of 16x16 pixels and 400 channels): what lies between its
# products, N_h times as many, then stays in a CPU's caches.
PORTION = 4 * 16 * 16 * 400
# Portions of which training keeps what lies between: making it again would cost a quarter of a small network's step.
KEPT = 4


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: (..., K), (N, K), (N,) -> (..., N)"""
    if torch.jit.is_scripting() or torch.compiler.is_compiling() or not by_convolution(x, weight):
        return torch_linear(x, weight, bias)
    images = x.reshape(IMAGES, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)  # (16, K, 1, rows / 16), channels last
    product = conv2d(images, weight[:, :, None, None], bias)
    return product.permute(0, 2, 3, 1).reshape([*x.shape[:-1], weight.shape[0]])


@torch.jit.unused
def by_convolution(x: Tensor, weight: Tensor) -> bool:
    """Whether a product belongs to oneDNN: its rows are many, and make up as many images as that takes."""
    if torch.jit.is_tracing():  # the graph would be of so many rows only
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    return ONEDNN and x.is_cpu and is_single(x, weight) and rows >= ROWS and rows % IMAGES == 0


class Linear(nn.Linear):
    """torch's linear layer, evaluated by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)"""
        return linear(x, self.weight, self.bias)


def sum_over_heads(heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """sum_h heads_h weight_h^T + bias: (B, N_h, T, D), (N, N_h D), (N,) -> (B, T, N)

    A convolution of images of N_h rows with a kernel as high as they are: heads need not be moved together.
    """
    num_heads, dim = heads.shape[1], heads.shape[3]
    if not by_kernel(heads, weight):
        return linear(heads.transpose(1, 2).flatten(2), weight, bias)
    kernel = weight.unflatten(1, [num_heads, 1, dim]).permute(0, 3, 1, 2)  # (N, D, N_h, 1), channels last
    return conv2d(heads.permute(0, 3, 1, 2), kernel, bias)[:, :, 0].transpose(1, 2)


def by_kernel(heads: Tensor, weight: Tensor) -> bool:
    """Whether a convolution sums over heads: in bfloat16 those of several images, as it lays out its kernel anew."""
    half = heads.dtype == weight.dtype == torch.bfloat16 and len(heads) >= BFLOAT16_IMAGES
    return ONEDNN and heads.is_cpu and heads.shape[1] > 1 and (half or is_single(heads, weight))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b image by image: (M, K) or (B, M, K), and (B, K, N) -> (B, M, N)"""
    if torch.jit.is_scripting() or torch.compiler.is_compiling() or not worth_it(a, b):
        return a @ b
    lefts = a.unbind() if a.ndim == 3 else [a] * b.shape[0]
    return torch.stack([linear(left, right.T) for left, right in zip(lefts, b.unbind(), strict=True)])


@torch.jit.unused
def worth_it(a: Tensor, b: Tensor) -> bool:
    """Whether one image's product belongs to oneDNN and outweighs what a call for each image costs."""
    return by_convolution(a, b) and a.shape[-2] * a.shape[-1] * b.shape[-1] > CALL


def in_portions(function: Callable[..., Tensor], X: Tensor, *more: Tensor, times: int = 1) -> Tensor:
    """function(X, *more), on a CPU of as many images at a time as its caches hold, or `times` as many.

    Where gradients of more than KEPT portions are wanted, each is evaluated once more for them, so that nothing which
    the function builds on the way, for attention N_h times as large as X, is kept. Not in half precision, whose
    products are fast: there it would take up to a quarter of the time.
    """
    if torch.compiler.is_compiling() or not X.is_cpu:
        return function(X, *more)
    images = images_at_once(X, times * PORTION)
    if images >= len(X) and not torch.is_grad_enabled():
        return function(X, *more)
    portions = zip(*(tensor.split(images) for tensor in (X, *more)), strict=True)
    if torch.is_grad_enabled():
        if X.numel() > KEPT * PORTION and not is_half(X):
            function = partial(checkpoint, function, use_reentrant=False)
        return joined([function(*portion) for portion in portions], dim=0)
    return filled(len(X), (function(*portion) for portion in portions))


def filled(images: int, parts: Iterable[Tensor]) -> Tensor:
    """joined(parts) of so many images in all, each part put in its place before the next one is made."""
    whole, place = torch.empty(0), 0
    for part in parts:
        whole = whole if place else part.new_empty(images, *part.shape[1:])
        whole[place : place + len(part)] = part
        place += len(part)
    return whole


class Room(threading.local):
    """Memory that results are written to again and again, each thread its own.

    Memory fresh from the system can take as long as the product that is written to it. A few portions are kept for as
    long as the thread lives, as oneDNN keeps its scratchpad.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], Tensor] = {}

    def of(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of that shape, in the place of the one given before under that name."""
        numbers, key = math.prod(shape), (name, dtype)
        if key not in self.held or self.held[key].numel() < numbers:
            with torch.inference_mode(False):  # what is made in this mode cannot be written to outside of it
                self.held[key] = torch.empty(numbers, dtype=dtype, device="cpu")
        return self.held[key][:numbers].view(shape)


ROOM = Room()


def images_at_once(X: Tensor, numbers: int) -> int:
    """Images of a batch (B, ...) that hold so many numbers, at least one."""
    return max(1, numbers // max(1, X[:1].numel()))


def rows_at_once(X: Tensor) -> int:
    """Rows of an image (B, H, W, D) whose numbers fill a portion."""
    return max(1, PORTION // max(1, X[:1, :1].numel()))


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The concatenation of parts; the part itself if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def is_single(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is evaluated in float32."""
    return x.dtype == weight.dtype == torch.float32 and not is_half(x)


def is_half(X: Tensor) -> bool:
    """Whether products of X are evaluated in half precision."""
    return X.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled("cpu")
