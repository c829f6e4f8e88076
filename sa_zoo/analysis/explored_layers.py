"""What the explorer's page knows of a layer: geometry, parameters of its heads, values, maps that cannot be computed.

Arrays travel as base64: {"shape", "f4"}, little-endian float32, or {"shape", "zlib"}, deflated uint8.
"""

import base64
import copy
import zlib
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sa_zoo.analysis.maps import LayerMaps
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import as_one_map

Json = dict[str, Any]  # of the page
Tensors = Mapping[str, Tensor]  # parameters by name
GEOMETRY = ("name", "heads", "grid", "keys", "image", "stride", "center", "padding")  # of LayerMaps
PARAMETERS = {  # by kind of maps: maps.js has the formulas
    "quadratic": ("Delta", "alpha"),
    "generalized": ("Delta", "spread"),
    "learned": ("down", "across"),
}
FILTERS = 16  # of a CNN's kernel that the page shows
PROBES = 7  # queries per axis that distances are averaged over


def numbers(x: Tensor) -> Json:
    """float32 numbers for the page."""
    content = x.detach().cpu().float().contiguous().numpy().tobytes()
    return {"shape": list(x.shape), "f4": base64.b64encode(content).decode()}


def described(layer: LayerMaps, recorded: Tensors) -> Json:
    """A layer for the page. `recorded`: positional parameters by name, at the epochs that the page shows."""
    page: Json = {name: getattr(layer, name) for name in GEOMETRY}
    page["distance"] = numbers(mean_distance(layer))
    if layer.dropped is not None:
        page["dropped"] = numbers(layer.dropped.mean(dim=(0, 2)))
    page["kind"] = layer.kind
    if layer.kind == "stored":
        page["stored"] = []  # the page's builder appends one item per image
    else:
        own = dict(layer.module.named_parameters(prefix=layer.name))
        own.update(layer.module.named_buffers(prefix=layer.name))  # taps have no parameters
        page["parameters"] = _parameters(layer.kind, own)
        path = {name: recorded[name] for name in own if name in recorded}
        if path:
            page["path"] = _parameters(layer.kind, path)
    module = layer.module
    if isinstance(module, (Attention, ConvolutionalAttention)):
        norms = value_norms(values_of(module))
        page["values"] = {name: numbers(value) for name, value in norms.items()}
    if isinstance(module, ConvolutionalAttention):
        page["kernel"] = list(module.kernel_size)
        page["filters"] = _filters(module)
    return page


def _parameters(kind: str, tensors: Tensors) -> Json:
    """Parameters as the page takes them; there may be an axis of epochs before the others."""
    own = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    if kind == "learned":  # r_delta . v_h and r_delta . w_h by displacement
        own["down"] = own["v"] @ own["col"].transpose(-1, -2)
        own["across"] = own["w"] @ own["row"].transpose(-1, -2)
    if kind == "quadratic" and "spread" in own:
        own["alpha"] = 0.5 * own["spread"].float().square().clamp(max=1e30)  # infinity * 0 is NaN
    return {name: numbers(own[name]) for name in PARAMETERS[kind]}


def stored(P: Tensor) -> Json:
    """Maps (N_h, T_queries, T_keys) in steps of 1/255 of the maximum of each query."""
    largest = P.amax(dim=-1)
    steps = (P * (255 / largest.clamp(min=1e-30))[..., None]).round().to(torch.uint8)
    packed = base64.b64encode(zlib.compress(steps.cpu().numpy().tobytes(), 9)).decode()
    return {"shape": list(P.shape), "zlib": packed, "largest": numbers(largest)}


def mean_distance(layer: LayerMaps) -> Tensor:
    """sum_k P[q, k] |delta|, in pixels of the layer's keys, averaged over queries and images: (N_h,)

    Mean attention distance, after Dosovitskiy et al. (ICLR 2021, https://arxiv.org/abs/2010.11929, Figure 7).
    """
    rows, columns = (torch.arange(size, dtype=torch.float32) for size in layer.keys)
    means = []
    for query in product(*(spaced(size, PROBES) for size in layer.grid)):
        down, across = layer.standing(query)
        distance = torch.hypot((rows - down)[:, None], (columns - across)[None, :])
        reached = (layer.at(query).cpu() * distance).sum(dim=(-2, -1))
        means.append(reached.reshape(-1, layer.heads).mean(dim=0))
    return torch.stack(means).mean(dim=0)


def values_of(module: Attention | ConvolutionalAttention) -> Tensor:
    """W_h of Eq. 10 for all heads: (D_out, N_h, D_in), float64"""
    if isinstance(module, ConvolutionalAttention):
        return module.W_val().detach().double().flatten(2).transpose(1, 2)
    inner = copy.deepcopy(module.W_val).double()
    outer = copy.deepcopy(module.W_out).double()
    W, _ = as_one_map(inner, outer)
    return W.unflatten(1, [-1, module.W_val.out_features])


def value_norms(W: Tensor) -> dict[str, Tensor]:
    """Norms of value matrices (D_out, N_h, D_in) in float64.

    In float32, some processors add the D_out * D_in products of the gram matrix one by one, and lose three digits.
    """
    norms = W.abs().sum(dim=2)  # (D_out, N_h): what certificate.py multiplies missed attention by
    gram = torch.einsum("ohi,ogi->hg", W, W)  # (N_h, N_h): norms of any sum of value matrices
    return {"norms": norms, "gram": gram}


def _filters(module: ConvolutionalAttention) -> Json:
    """Some filters of the kernel: all colors of a first layer, else the input channel of most weight: (n, C, *K)"""
    kernel = module.W_val().detach().float()
    kernel = kernel[spaced(len(kernel), FILTERS)]
    if kernel.shape[1] != 3:
        strongest = kernel.square().sum(dim=(2, 3)).argmax(dim=1)
        kernel = kernel[torch.arange(len(kernel)), strongest][:, None]
    return numbers(kernel)


def spaced(size: int, most: int) -> list[int]:
    """At most so many indices of `size`, evenly spaced, with the first and the last."""
    return [round(at) for at in torch.linspace(0, size - 1, min(size, most)).tolist()]
