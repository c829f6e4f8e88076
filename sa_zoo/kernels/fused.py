"""Attention by axes and its projection in one pass, by compiled code: fused.cpp.

Built when the package is installed, if there is a compiler, for processors with AVX-512. torch's environment variable
ATEN_CPU_CAPABILITY=avx2 leaves it unused. `can_fuse` says for which inputs it works.
"""

import ctypes
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sa_zoo.kernels.situation import Situation
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import is_plain

# fused.cpp takes numbers of channels that are multiples of this.
LANES = 16
# Numbers that a head attends to in a tile (128 pixels of 400 channels): a fifth of a core's own cache.
TILE = 128 * 400


def _loaded() -> ctypes.CDLL | None:
    """The compiled code, where it was built and the processor can run it."""
    found = find_spec(f"{__package__}._fused")
    if found is None or found.origin is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        library = ctypes.CDLL(found.origin)
    except OSError as error:  # it uses torch's OpenMP, which some builds of torch do not have
        warnings.warn(f"attention is evaluated without compiled code: {error}", stacklevel=2)
        return None
    library.sa_zoo_room.argtypes = [ctypes.c_int] * 3
    library.sa_zoo_room.restype = ctypes.c_ssize_t
    library.sa_zoo_fused_values.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_int] * 8
    library.sa_zoo_fused_values.restype = None
    return library


LIBRARY = _loaded()


def takes(X: Tensor, W_val: Tensor, *others: Tensor) -> bool:
    """Whether `fused_values` accepts X (B, H, W, D) and W_val (N, N_h D), and the other tensors' types and devices."""
    right = all(x.is_cpu and x.dtype == torch.float32 for x in (X, W_val, *others))
    fills_lanes = X.shape[-1] % LANES == 0 and W_val.shape[0] % LANES == 0
    return LIBRARY is not None and right and fills_lanes


def can_fuse(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether `fused` evaluates the layer: separable terms, no gradients, a projection that is a weight and a bias."""
    inference = now.ordinary and not now.trains and not now.autocast
    plain = layer.factorizes() and is_plain(layer.W_val)
    return inference and plain and takes(X, layer.W_val.weight)


def fused(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """The layer for separable terms, without gradients: (B, H, W, D) -> (B, H, W, D)"""
    factors = [P.to(X.dtype) for P in layer.axis_probabilities(X)]  # terms may be float64
    return fused_values(X, *factors, layer.W_val.weight, layer.W_val.bias)


@torch.library.custom_op("sa_zoo::fused_values", mutates_args=(), device_types="cpu")
def fused_values(
    X: Tensor, P_down: Tensor, P_across: Tensor, W_val: Tensor, b_val: Tensor | None
) -> Tensor:
    """sum_h P_h X W_val_h^T + b_val for P_h = P_down_h (x) P_across_h, in float32.

    (B, H, W, D), (N_h, H, H), (N_h, W, W), (N, N_h D), (N,) -> (B, H, W, N)

    The result for an image is the same, bit for bit, in any batch and on any number of threads. Raises ValueError for
    other shapes or types, or if `can_fuse` is false.
    """
    B, H, W, D = X.shape
    N_h = len(P_down)
    N = len(W_val)
    if b_val is None:
        b_val = X.new_zeros(N)
    given = [P_down, P_across, W_val, b_val]
    expected = [(N_h, H, H), (N_h, W, W), (N, N_h * D), (N,)]
    fits = [tuple(tensor.shape) for tensor in given] == expected
    if LIBRARY is None or not fits or not takes(X, W_val, *given):
        got = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (X, *given))
        raise ValueError(
            f"got {got}, expected an AVX-512 processor, float32, channels in multiples of {LANES}, "
            f"and after X {expected}"
        )
    inputs = [tensor.contiguous() for tensor in (X, *given)]
    threads = torch.get_num_threads()
    # Rows of an image in a tile: as a cache holds, or fewer, so that each thread gets one.
    height = max(1, min(H, TILE // (W * D), B * H // threads))
    out = X.new_empty(B, H, W, N)
    packed = X.new_empty(W_val.numel())
    rooms = X.new_empty(threads * LIBRARY.sa_zoo_room(height, W, D))
    places = [tensor.data_ptr() for tensor in (*inputs, out, packed, rooms)]
    LIBRARY.sa_zoo_fused_values(*places, B, H, W, D, N, N_h, height, threads)
    return out


@fused_values.register_fake
def _(X: Tensor, P_down: Tensor, P_across: Tensor, W_val: Tensor, b_val: Tensor | None) -> Tensor:
    return X.new_empty(*X.shape[:3], W_val.shape[0])


@register_flop_formula(torch.ops.sa_zoo.fused_values, get_raw=True)
def _flops(X: Tensor, P_down: Tensor, P_across: Tensor, W_val: Tensor, *_: Any, **__: Any) -> int:
    """Two per multiplication by a weight or by a probability that is not zero."""
    B, H, W, D = X.shape
    mixing = int(P_down.count_nonzero()) * W * D + int(P_across.count_nonzero()) * H * D
    return 2 * B * (mixing + H * W * W_val.numel())
