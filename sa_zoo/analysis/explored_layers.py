"""What the explorer's page knows of a layer: geometry, parameters of its heads, values, maps that cannot be computed.

Arrays travel as base64: {"shape", "f4"}, little-endian float32, or {"shape", "zlib"}, deflated uint8.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.analysis.maps import LayerMaps
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import GeneralizedQuadratic, Learned, Quadratic, QuadraticKernel

GEOMETRY = ("name", "heads", "grid", "keys", "image", "stride", "center", "padding")  # of LayerMaps
# How the page computes the maps of these terms; those of convolutional layers are quadratic, others are stored.
KINDS = {
    Quadratic: "quadratic",
    QuadraticKernel: "quadratic",
    GeneralizedQuadratic: "generalized",
    Learned: "learned",
}
FILTERS = 16  # of a CNN's kernel that the page shows
EPOCHS = 100  # of a training path, besides its start
PROBES = 7  # queries per axis that distances are averaged over


def numbers(x: Tensor) -> dict[str, Any]:
    """float32 numbers for the page."""
    content = x.detach().cpu().float().contiguous().numpy().tobytes()
    return {"shape": list(x.shape), "f4": base64.b64encode(content).decode()}


def described(layer: LayerMaps, recorded: Mapping[str, Tensor]) -> dict[str, Any]:
    """A layer for the page. `recorded`: positional parameters by epoch, as in heads.safetensors."""
    module = layer.module
    page: dict[str, Any] = {name: getattr(layer, name) for name in GEOMETRY} | {
        "distance": numbers(mean_distance(layer))
    }
    if layer.dropped is not None:
        page["dropped"] = numbers(layer.dropped.mean(dim=(0, 2)))
    source, prefix, kind = (
        module,
        layer.name,
        "quadratic" if isinstance(module, ConvolutionalAttention) else "stored",
    )
    if isinstance(module, Attention) and len(module.terms) == 1:
        source, prefix = module.terms[0], f"{layer.name}.terms.0"
        kind = KINDS.get(type(source), "stored")
    page["kind"] = kind = kind if layer.positional else "stored"
    if kind != "stored":
        own = {name: value.detach() for name, value in source.state_dict().items()}
        path = {name: recorded[key] for name in own if (key := f"{prefix}.{name}") in recorded}
        page["parameters"] = _packed(_parameters(kind, own))
        if path:
            shown = _rows(len(next(iter(path.values()))))
            page["path"] = _packed(
                _parameters(kind, {name: value[shown] for name, value in path.items()})
            )
    else:
        page["stored"] = []  # one item per image, filled in by the page's builder
    if isinstance(module, (Attention, ConvolutionalAttention)):
        W = _values(module)
        page["values"] = {
            "norms": numbers(
                W.abs().sum(dim=2)
            ),  # (D_out, N_h): what certificate.py multiplies missed attention by
            "gram": numbers(
                torch.einsum("ohi,ogi->hg", W, W)
            ),  # (N_h, N_h): norms of any sum of value matrices
        }
    if isinstance(module, ConvolutionalAttention):
        page |= {"kernel": list(module.kernel_size), "filters": _filters(module)}
    return page


def stored(P: Tensor) -> dict[str, Any]:
    """Maps (N_h, T_queries, T_keys) in steps of 1/255 of the maximum of each query."""
    largest = P.amax(dim=-1)
    steps = (P * (255 / largest.clamp(min=1e-30))[..., None]).round().to(torch.uint8)
    packed = base64.b64encode(zlib.compress(steps.cpu().numpy().tobytes(), 9)).decode()
    return {"shape": list(P.shape), "zlib": packed, "largest": numbers(largest)}


def recorded_epochs(recorded: Mapping[str, Tensor]) -> list[int]:
    """Numbers of the epochs that the page can show; 0 is the initialization."""
    return _rows(min(map(len, recorded.values()))) if recorded else []


def mean_distance(layer: LayerMaps) -> Tensor:
    """sum_k P[q, k] |delta|, in pixels of the layer's keys, averaged over queries and images: (N_h,)

    Mean attention distance, after Dosovitskiy et al. (ICLR 2021, https://arxiv.org/abs/2010.11929, Figure 7).
    """
    places = [
        sorted({round(at) for at in torch.linspace(0, size - 1, PROBES).tolist()})
        for size in layer.grid
    ]
    rows, columns = (torch.arange(size, dtype=torch.float32) for size in layer.keys)
    means = []
    for query in ((down, across) for down in places[0] for across in places[1]):
        down, across = layer.standing(query)
        distance = torch.hypot((rows - down)[:, None], (columns - across)[None, :])
        means.append(
            (layer.at(query).cpu() * distance)
            .sum(dim=(-2, -1))
            .reshape(-1, layer.heads)
            .mean(dim=0)
        )
    return torch.stack(means).mean(dim=0)


def _parameters(kind: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters as the page takes them; there may be an axis of epochs before the others."""
    if kind == "quadratic":
        alpha = own["alpha"] if "alpha" in own else 0.5 * own["spread"].float().square()
        return {"Delta": own["Delta"], "alpha": alpha}
    if kind == "generalized":
        return {"Delta": own["Delta"], "spread": own["spread"]}
    scores = {
        "down": ("v", "col"),
        "across": ("w", "row"),
    }  # r_delta . v_h and r_delta . w_h by displacement
    return {
        axis: own[vector] @ own[table].transpose(-1, -2) for axis, (vector, table) in scores.items()
    }


def _values(module: Attention | ConvolutionalAttention) -> Tensor:
    """W_h of Eq. 10 for all heads: (D_out, N_h, D_in)"""
    if isinstance(module, ConvolutionalAttention):
        return module.W_val().detach().float().flatten(2).transpose(1, 2)
    W = module.W_val.weight.detach().float()
    if isinstance(module.W_out, nn.Linear):
        W = module.W_out.weight.detach().float() @ W
    return W.unflatten(1, [-1, module.W_val.out_features])


def _filters(module: ConvolutionalAttention) -> dict[str, Any]:
    """Some filters of the kernel: all colors of a first layer, else the input channel of most weight: (n, C, *K)"""
    kernel = module.W_val().detach().float()
    kernel = kernel[torch.linspace(0, len(kernel) - 1, min(FILTERS, len(kernel))).round().long()]
    if kernel.shape[1] != 3:
        strongest = kernel.square().sum(dim=(2, 3)).argmax(dim=1)
        kernel = kernel[torch.arange(len(kernel)), strongest][:, None]
    return numbers(kernel)


def _rows(count: int) -> list[int]:
    return sorted({round(at) for at in torch.linspace(0, count - 1, EPOCHS + 1).tolist()})


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: numbers(value) for name, value in tensors.items()}
