"""Fix every head to one pixel, its tap, which makes the layer a convolution.

A head of infinite sharpness reads the pixel nearest to its center (theorem.py, `limit_of_attention`). `harden` chooses
a distinct pixel for each head. The attention of a head to any pixel moves to the tap nearest to that pixel, with the
head's value matrix. With P_h the attention of head h far from the border,

    W_val'_g = sum_h M_hg W_val_h,    M_hg = sum of P_h[delta] over all delta nearest to tap g

Outputs for images of one color stay the same; training has to restore the others. Symbols: models/attention.py.
"""

import torch
from torch import Tensor, nn

from sa_zoo.convolution.soft_attention import SoftAttention
from sa_zoo.convolution.theorem import (
    head_shifts,
    limit_of_attention,
    neighborhoods_with,
    spread_matrices,
)
from sa_zoo.convolution.values import ValueMatrices
from sa_zoo.models.attention import Attention
from sa_zoo.models.linear import is_plain, owns
from sa_zoo.models.terms import GeneralizedQuadratic, Quadratic

# Of a tap: an alpha of 2048, exact in every floating-point type, leaves nothing for other pixels.
TAP_SPREAD = 64.0
COMPUTED = (
    "some of its weights are computed; merge adapters, remove parametrizations and pruning first"
)
Layer = Attention | SoftAttention


@torch.no_grad()
def harden(model: nn.Module) -> dict[str, list[list[int]]]:
    """Fix every head to one pixel, in place, and freeze it there. Call it before creating the optimizer, then train.

    The architecture stays the same: Delta holds integers, and the spread is large. The heads of a network's layer read
    the pixels with most of their attention. Those of a SoftAttention read the pixels of its kernel, so
    `conv_from_attention` returns a convolution of its size. A layer whose heads are taps already keeps its function.

    Returns the displacements (row, column) read by the heads of each layer. Raises ValueError, before anything is
    changed, for a network without such layers, for layers with content terms or learned encodings, and for
    images with fewer displacements than a layer has heads.
    """
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            layers[name] = module
            reason = why_not_taps(module)
            if reason:
                raise ValueError(
                    f"model: got the layer {name or type(module).__name__!r} whose heads cannot be taps: {reason}"
                )
    if not layers:
        raise ValueError(f"model: got {type(model).__name__}, expected one with quadratic heads")
    return {
        name: _harden_attention(layer)
        if isinstance(layer, Attention)
        else _harden_convolutional(layer)
        for name, layer in layers.items()
    }


def why_not_taps(layer: Layer) -> str:
    """Why the heads of a layer cannot read one pixel each; empty if they can."""
    if isinstance(layer, SoftAttention):
        own = owns(layer, "Delta", "alpha") and owns(layer.W_val, "weight")
        if not own or not isinstance(layer.W_val, ValueMatrices):
            return COMPUTED
        if not layer.neighborhoods():
            return "one has no bounded support (its alpha is not positive, or its Delta not finite)"
        return ""
    term = layer.terms[0]
    if len(layer.terms) > 1 or not isinstance(term, Quadratic | GeneralizedQuadratic):
        return "its scores have more than a center and a sharpness per head"
    if not is_plain(layer.W_val) or not owns(term, "Delta", "spread"):
        return COMPUTED
    if not all(parameter.isfinite().all() for parameter in term.parameters()):
        return "its Delta or its spread is not finite"
    height, width = layer.grid
    displacements = (2 * height - 1) * (2 * width - 1)
    if displacements < len(term.Delta):
        return f"its {height}x{width} pixels have {displacements} displacements for {len(term.Delta)} heads"
    return ""


def _harden_attention(layer: Attention) -> list[list[int]]:
    (term,) = layer.terms
    axes = [torch.arange(1 - size, size, dtype=torch.float64) for size in layer.grid]
    offsets = torch.cartesian_prod(*axes)
    # of equal shares, the pixel nearest to the query comes first
    offsets = offsets[offsets.square().sum(dim=1).argsort(stable=True)]
    P = attention_far_from_borders(term.Delta, term.spread, offsets)
    taps = offsets[distinct_keys(P)].unique(dim=0)  # row by row, as a convolution stores its kernel
    M = P @ limit_of_attention(offsets, taps)
    values = layer.W_val.weight.double().unflatten(1, [len(M), -1])  # (D_out, N_h, D)
    moved = torch.einsum("ohi,hg->ogi", values, M.to(values))
    layer.W_val.weight.copy_(moved.flatten(1))
    one = torch.eye(2) if term.spread.ndim == 3 else torch.ones(())
    term.spread.copy_(TAP_SPREAD * one)
    pixels = _freeze(taps, term.Delta, term.spread)
    layer.set_grid(layer.grid)  # a deployed layer renews its constants
    return pixels


def _harden_convolutional(layer: SoftAttention) -> list[list[int]]:
    taps = head_shifts(layer.kernel_size, layer.dilation, layer.center).double()
    Delta = layer.Delta.detach().cpu().double()
    alpha = layer.alpha.detach().cpu().double()
    axes = [
        torch.tensor(neighborhood).double()
        for neighborhood in neighborhoods_with(taps, Delta, alpha)
    ]
    offsets = torch.cartesian_prod(*axes).view(-1, len(axes))
    P = attention_far_from_borders(Delta, (2 * alpha).sqrt(), offsets)
    M = P @ limit_of_attention(offsets, taps)
    values = layer.W_val.weight
    moved = values.double().flatten(2) @ M.to(values.device)
    values.copy_(moved.view_as(values))
    layer.alpha.fill_(0.5 * TAP_SPREAD**2)
    return _freeze(taps, layer.Delta, layer.alpha)


def attention_far_from_borders(Delta: Tensor, spread: Tensor, offsets: Tensor) -> Tensor:
    """softmax(-1/2 |S_h^T (delta - Delta_h)|^2) at (d, n): (N_h, n), (N_h,) or (N_h, n, n) -> (N_h, d)"""
    S = spread_matrices(spread.detach().cpu().double(), offsets.shape[1])
    away = offsets - Delta.detach().cpu().double()[:, None, :]
    return torch.softmax(-0.5 * (away @ S).square().sum(dim=-1), dim=1)


def distinct_keys(P: Tensor) -> Tensor:
    """A distinct key for each head, greedily by the largest remaining share: (N_h, n) -> (N_h,)"""
    left = P.clone()
    keys = torch.empty(len(P), dtype=torch.long)
    for _ in range(len(P)):
        head, key = divmod(int(left.argmax()), left.shape[1])
        keys[head] = key
        left[head] = -1.0
        left[:, key] = -1.0
    return keys


def _freeze(taps: Tensor, Delta: Tensor, sharpness: Tensor) -> list[list[int]]:
    Delta.copy_(taps)
    Delta.requires_grad_(False)
    sharpness.requires_grad_(False)
    return taps.int().tolist()
