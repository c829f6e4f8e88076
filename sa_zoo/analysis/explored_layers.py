"""A layer on the explorer's page: geometry, parameters of its heads, values, and stored maps where needed.

Arrays travel as base64: {"shape", "f4"}, little-endian float32, or {"shape", "zlib"}, deflated uint8.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sa_zoo.analysis.heads import measure
from sa_zoo.analysis.maps import LayerMaps
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.models.linear import as_one_map

Json = dict[str, Any]  # of the page
GEOMETRY = ("name", "kind", "heads", "grid", "keys", "image", "stride", "center", "padding")


def pack_floats(x: Tensor) -> Json:
    """float32 numbers for the page."""
    content = x.detach().cpu().float().numpy().tobytes()
    return {"shape": x.shape, "f4": base64.b64encode(content).decode()}


def layer_data(layer: LayerMaps, recorded: Mapping[str, Tensor]) -> Json:
    """A layer for the page. `recorded`: positional parameters by name, at the epochs on the page."""
    page = {name: getattr(layer, name) for name in GEOMETRY}
    page["distance"] = pack_floats(measure(layer).reach)
    if layer.token_share is not None:
        page["token_share"] = pack_floats(layer.token_share.mean(dim=(0, 2)))
    if layer.kind == "stored":
        return page
    module = layer.module
    own = {f"{layer.name}.{name}": tensor for name, tensor in module.state_dict().items()}
    page["parameters"] = _parameters(layer.kind, own)
    path = {name: recorded[name] for name in own if name in recorded}
    if path:
        page["path"] = _parameters(layer.kind, path)
    page["convolution"] = isinstance(module, ConvolutionalAttention)
    if isinstance(module, ConvolutionalAttention):
        W = module.weight.flatten(2).transpose(1, 2)
    else:
        W, _ = as_one_map(module.W_val, module.W_out)  # W_h of Eq. 10, including W_out
        W = W.unflatten(1, [layer.heads, -1])
    page["values"] = _values(W.double())
    return page


def _parameters(kind: str, tensors: Mapping[str, Tensor]) -> Json:
    """Parameters for the formulas in maps.js; the first axis may be epochs."""
    own = {name.rpartition(".")[2]: tensor.float() for name, tensor in tensors.items()}
    if kind == "learned":  # r_delta . v_h and r_delta . w_h by displacement
        down = own["v"] @ own["col"].mT
        return {"down": pack_floats(down), "across": pack_floats(own["w"] @ own["row"].mT)}
    Delta = pack_floats(own["Delta"])
    if kind == "generalized":
        return {"Delta": Delta, "spread": pack_floats(own["spread"])}
    alpha = 0.5 * own["spread"].square() if "spread" in own else own["alpha"]
    # finite, as JavaScript multiplies it by 0
    return {"Delta": Delta, "alpha": pack_floats(alpha.clamp(max=1e30))}


def pack_maps(layer: LayerMaps, image: int) -> Json:
    """Maps of an image, (N_h, T_queries, T_keys), in steps of 1/255 of the maximum of each query."""
    (P,) = layer.factors
    if not layer.positional:
        P = P[image]
    largest = P.amax(dim=-1)
    steps = (P * (255 / largest.clamp(min=1e-30))[..., None]).round().to(torch.uint8)
    packed = base64.b64encode(zlib.compress(steps.cpu().numpy().tobytes(), 9)).decode()
    return {"shape": P.shape, "zlib": packed, "largest": pack_floats(largest)}


def _values(W: Tensor) -> Json:
    """Norms of value matrices (D_out, N_h, D_in) in float64.

    In float32, some processors add the D_out * D_in products of the gram matrix one by one, losing three digits.
    """
    norms = W.abs().sum(dim=2)  # (D_out, N_h): factors of missed attention in certificate.py
    gram = torch.einsum("ohi,ogi->hg", W, W)  # (N_h, N_h): norms of any sum of value matrices
    return {"norms": pack_floats(norms), "gram": pack_floats(gram)}
