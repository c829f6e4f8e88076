"""Whole networks: replace chosen convolutions by multi-head self-attention, and report the effect."""

import copy
import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sa_zoo.convolution.certificate import certificate
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.layer_conversion import attention_in_place, why_not
from sa_zoo.convolution.values import ValueMatrices
from sa_zoo.models.terms import declared


@dataclass(frozen=True)
class LayerReport:
    """One converted layer, measured with an image."""

    name: str
    heads: int
    shifts: list[list[int]]  # the distinct Delta along each axis
    alpha: float
    parameters: int
    macs: int  # multiply-adds executed by the attention
    conv_macs: int  # multiply-adds of the convolution
    bound: float  # certificate.py's, of the difference of outputs, for the largest input
    measured: float  # the difference of outputs


@dataclass(frozen=True)
class NetworkReport:
    """`convert`'s report. `logits`: largest difference of the networks' outputs, relative to the largest output."""

    layers: list[LayerReport]
    skipped: dict[str, str]  # layer: why
    logits: float

    def table(self) -> str:
        """The report as Markdown."""
        rows = [
            f"| {row.name} | {row.heads} | {' x '.join(map(_range, row.shifts))} | {row.alpha:g} | {row.parameters:,} "
            f"| {row.macs / 1e6:,.1f} | {row.conv_macs / 1e6:,.1f} | {row.bound:.1e} | {row.measured:.1e} |"
            for row in self.layers
        ]
        head = "| layer | heads | shifts | alpha | parameters | MMACs | as convolution | bound | measured |"
        skipped = [f"Not converted: {name}, as {reason}." for name, reason in self.skipped.items()]
        total = (
            f"Largest difference of the outputs, relative to the largest output: {self.logits:.1e}."
        )
        return "\n".join([head, "|---" * 9 + "|", *rows, "", *skipped, total, ""])


def _range(shifts: list[int]) -> str:
    return str(shifts[0]) if len(shifts) == 1 else f"{shifts[0]}..{shifts[-1]}"


def convert(
    network: nn.Module,
    layers: str = "*",
    alpha: float = 46.0,
    example: Tensor | None = None,
) -> tuple[nn.Module, NetworkReport]:
    """A copy of any network with the chosen convolutions as multi-head self-attention, and a report of the effect.

    Args:
        layers: names of layers, with wildcards as in a shell; patterns are separated by commas.
        alpha: see attention_from_conv.
        example: images to measure with, (B, channels, *image); default: noise of the network's input size.

    Raises:
        ValueError: if no layer is chosen, or none of the chosen ones can be expressed.
    """
    if example is None:
        size = getattr(network, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
        noise = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
        example = noise.to(next(network.parameters()))
    converted = copy.deepcopy(network)
    convolutions, skipped = _to_convert(converted, layers)
    inputs: dict[nn.Module, list[Tensor]] = {conv: [] for conv in convolutions.values()}

    def record(conv: nn.Module, x: Tensor) -> None:
        # A copy, as a network may overwrite its activations.
        inputs[conv].append(x.clone())

    with torch.no_grad():
        before = call_before(converted, inputs, example, record)
        attentions = _swap(converted, convolutions.values(), alpha)
        rows = [
            _row(name, conv, attentions[conv], inputs[conv])
            for name, conv in convolutions.items()
            if inputs[conv]
        ]
        after = converted(example)
    # Parents come first: a mode is passed on to all children, which then get their own.
    for name, module in network.named_modules(remove_duplicate=False):
        converted.get_submodule(name).train(module.training)
    return converted, NetworkReport(rows, skipped, _difference(before, after))


def call_before(
    network: nn.Module,
    layers: Iterable[nn.Module],
    images: Tensor,
    function: Callable[[Any, Tensor], None],
) -> Any:
    """Put a network in eval mode, evaluate it, and call function(layer, input) before each of these layers."""
    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_pre_hook(lambda layer, inputs: function(layer, *inputs))
            hooks.enter_context(hook)
        return network.eval()(images)


def swap_convolutions(network: nn.Module, layers: str, alpha: float) -> None:
    """Replace the chosen convolutions that can be expressed, in place. Arguments and errors: see `convert`."""
    convolutions, _ = _to_convert(network, layers)
    _swap(network, convolutions.values(), alpha)


def _to_convert(network: nn.Module, layers: str) -> tuple[dict[str, _ConvNd], dict[str, str]]:
    """Convolutions to convert, and the reasons for skipping other chosen ones, by name."""
    uses = Counter(
        id(weight) for module in network.modules() for weight in module.parameters(recurse=False)
    )
    # If the network itself is a convolution, it has no name.
    named = {
        name: module
        for name, module in network.named_modules()
        if name and isinstance(module, _ConvNd) and not isinstance(module, ValueMatrices)
    }
    patterns = [part.strip() for part in layers.split(",")]
    chosen = [name for name in named if any(fnmatch.fnmatchcase(name, part) for part in patterns)]
    if not chosen:
        has = ", ".join(named) or "none"
        raise ValueError(f"layers: got {layers!r}, expected names of convolutions; there are {has}")
    convolutions: dict[str, _ConvNd] = {}
    skipped: dict[str, str] = {}
    for name in chosen:
        conv = named[name]
        reason = why_not(conv)
        if uses[id(conv.weight)] > 1:
            reason = "its weight is another layer's too"
        if reason:
            skipped[name] = reason
        else:
            convolutions[name] = conv
    if not convolutions:
        why = "; ".join(sorted(set(skipped.values())))
        raise ValueError(
            f"layers: got {layers!r}, expected layers that attention can express: {why}"
        )
    return convolutions, skipped


def _swap(
    network: nn.Module, convolutions: Iterable[_ConvNd], alpha: float
) -> dict[nn.Module, ConvolutionalAttention]:
    """Replace convolutions wherever they are used; returns the attention of each."""
    attentions: dict[nn.Module, ConvolutionalAttention] = {
        conv: attention_in_place(conv, alpha) for conv in convolutions
    }
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module in attentions:
            network.set_submodule(name, attentions[module])
    network.no_weight_decay = partial(undecayed, network)  # type: ignore[assignment]  # nn.Module knows no methods
    return attentions


def undecayed(network: nn.Module) -> set[str]:
    """Parameters without weight decay, for timm: positions, sharpness, and those the network names."""
    own: set[str] = getattr(type(network), "no_weight_decay", lambda _: set())(network)
    return own | set(declared(network, "not_decayed"))


def _difference(before: Any, after: Any) -> float:
    """Largest difference of corresponding tensors in two outputs, relative to the largest value of each."""
    differences = [0.0]
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if isinstance(old, Tensor):
            largest = max(float(old.abs().max()), torch.finfo(torch.float32).tiny)
            differences.append(float((new - old).abs().max()) / largest)
    return max(differences)


def _row(
    name: str, conv: _ConvNd, attention: ConvolutionalAttention, inputs: list[Tensor]
) -> LayerReport:
    """The layer's report, for the input on which attention and convolution differ most."""
    differences = [float((attention(x) - conv(x)).abs().max()) for x in inputs]
    measured = max(differences)
    x = inputs[differences.index(measured)]
    with FlopCounterMode(display=False) as counted:
        output = attention(x[:1])
    return LayerReport(
        name=name,
        heads=len(attention.alpha),
        shifts=[sorted({round(shift) for shift in axis}) for axis in attention.Delta.T.tolist()],
        alpha=float(attention.alpha.min()),
        parameters=sum(parameter.numel() for parameter in attention.parameters()),
        macs=counted.get_total_flops() // 2,
        conv_macs=attention.weight.numel() * math.prod(output.shape[2:]),
        bound=certificate(attention, x.shape[2:], float(x.abs().max())).worst,
        measured=measured,
    )
