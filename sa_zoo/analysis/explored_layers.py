"""A layer on the explorer's page: geometry, parameters of its heads, values, and stored maps where needed.

Arrays travel as base64: {"shape", "f4"}, little-endian float32, or {"shape", "zlib"}, deflated uint8.
"""

import base64
import copy
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sa_zoo.analysis.heads import mean_distance, sample
from sa_zoo.analysis.maps import LayerMaps
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.models.attention import Attention
from sa_zoo.models.linear import as_one_map

Json = dict[str, Any]  # of the page
Tensors = Mapping[str, Tensor]  # parameters by name
GEOMETRY = ("name", "heads", "grid", "keys", "image", "stride", "center", "padding")  # of LayerMaps
FORMULAS = {  # parameters by kind of maps; the formulas are in maps.js
    "quadratic": ("Delta", "alpha"),
    "generalized": ("Delta", "spread"),
    "learned": ("down", "across"),
}
LARGEST_ALPHA = 1e30  # for heads with infinite alpha


def pack_floats(x: Tensor) -> Json:
    """float32 numbers for the page."""
    content = x.detach().cpu().float().numpy().tobytes()
    return {"shape": x.shape, "f4": base64.b64encode(content).decode()}


def layer_data(layer: LayerMaps, recorded: Tensors) -> Json:
    """A layer for the page. `recorded`: positional parameters by name, at the epochs on the page."""
    page = {name: getattr(layer, name) for name in GEOMETRY}
    page["distance"] = pack_floats(mean_distance(sample(layer)))
    if layer.token_share is not None:
        page["token_share"] = pack_floats(layer.token_share.mean(dim=(0, 2)))
    page["kind"] = layer.kind
    module = layer.module
    if layer.kind == "stored":
        page["stored"] = []  # explorer.py appends one item per image
    else:
        # Taps keep their positions in buffers that are not saved.
        named = chain(module.named_parameters(), module.named_buffers())
        own = {f"{layer.name}.{name}": tensor for name, tensor in named}
        page["parameters"] = _parameters(layer.kind, own)
        path = {name: recorded[name] for name in own if name in recorded}
        if path:
            page["path"] = _parameters(layer.kind, path)
    page["convolution"] = isinstance(module, ConvolutionalAttention)
    if isinstance(module, ConvolutionalAttention):
        page["values"] = _values(module.W_val().double().flatten(2).transpose(1, 2))
    elif isinstance(module, Attention):
        page["values"] = _values(value_matrices(module))
    return page


def _parameters(kind: str, tensors: Tensors) -> Json:
    """Parameters for the page; the first axis may be epochs."""
    own = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    if kind == "learned":  # r_delta . v_h and r_delta . w_h by displacement
        own["down"] = own["v"] @ own["col"].transpose(-1, -2)
        own["across"] = own["w"] @ own["row"].transpose(-1, -2)
    if "spread" in own:
        own["alpha"] = 0.5 * own["spread"].float().square()
    if kind == "quadratic":  # finite, as JavaScript multiplies it by 0
        own["alpha"] = own["alpha"].clamp(max=LARGEST_ALPHA)
    return {name: pack_floats(own[name]) for name in FORMULAS[kind]}


def pack_maps(layer: LayerMaps, image: int) -> Json:
    """Maps of an image, (N_h, T_queries, T_keys), in steps of 1/255 of the maximum of each query."""
    P = layer.maps if layer.positional else layer.maps[image]
    largest = P.amax(dim=-1)
    steps = (P * (255 / largest.clamp(min=1e-30))[..., None]).round().to(torch.uint8)
    packed = base64.b64encode(zlib.compress(steps.cpu().numpy().tobytes(), 9)).decode()
    return {"shape": P.shape, "zlib": packed, "largest": pack_floats(largest)}


def value_matrices(attention: Attention) -> Tensor:
    """W_h of Eq. 10 for all heads, including W_out: (D_out, N_h, D), float64"""
    wide = copy.deepcopy(attention).double()
    W, _ = as_one_map(wide.W_val, wide.W_out)
    return W.unflatten(1, [attention.num_heads, -1])


def _values(W: Tensor) -> Json:
    """Norms of value matrices (D_out, N_h, D_in) in float64.

    In float32, some processors add the D_out * D_in products of the gram matrix one by one, losing three digits.
    """
    norms = W.abs().sum(dim=2)  # (D_out, N_h): factors of missed attention in certificate.py
    gram = torch.einsum("ohi,ogi->hg", W, W)  # (N_h, N_h): norms of any sum of value matrices
    return {"norms": pack_floats(norms), "gram": pack_floats(gram)}
