"""The cases of `sa-zoo bench`: models in all phases, and single layers. scripts/bench.py defines further ones."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import timm
import torch
from benchmark import Case, Subject, step
from timm.data import resolve_model_data_config
from timm.utils import reparameterize_model
from torch import nn
from torchvision.ops import Permute

from sa_zoo.models.network import SANet

PHASES = (
    "inference, float32",
    "inference, bfloat16",
    "training, float32",
    "training, float32, dropout on probabilities",
    "training, bfloat16",
)
LARGEST_MAPS = 2**32  # bytes; larger attention maps are not built

Subjects = dict[str, Subject]
# Name -> what is made of a registered model, and the route of its layers ("": as they choose).
Variants = dict[str, tuple[Callable[[Any], nn.Module], str]]


def check_names(models: Iterable[str], phase: str) -> None:
    """Raise ValueError for a model or a phase that the benchmark does not know."""
    if unknown := [name for name in models if not timm.is_model(name)]:
        ours = ", ".join(timm.list_models(module="timm_models"))
        raise ValueError(
            f"MODEL: got {unknown[0]!r}, expected a name that timm lists, such as {ours}"
        )
    if not any(known.startswith(phase) for known in PHASES):
        raise ValueError(
            f"--phase: got {phase!r}, expected the beginning of one of {', '.join(PHASES)}"
        )


def with_convolutions(network: SANet) -> SANet:
    """A copy whose blocks mix pixels by 3x3 convolutions, with the same channels and feed-forward layers."""
    twin, dim, like = copy.deepcopy(network), network.embed_dim, network.patch_embed.weight
    for block in twin.blocks:
        convolution = nn.Conv2d(dim, dim, 3, padding=1, device=like.device, dtype=like.dtype)
        block.attn = nn.Sequential(
            Permute([0, 3, 1, 2]), convolution, Permute([0, 2, 3, 1])
        )  # tokens: (B, H, W, D)
    return twin


def unchanged(network: nn.Module) -> nn.Module:
    return network


def networks(
    model: str,
    phase: str,
    batch: int,
    device: torch.device,
    variants: Variants,
    yardstick: str,
    compile_mode: str = "",
) -> Case:
    """A case of whole networks, and of the network as torch.compile makes it if there is a mode for it.

    A variant whose name ends in "float32" has that type, whatever the phase.
    """

    def build() -> Subjects:
        found: Subjects = {}
        for name, (change, route) in variants.items():
            torch.manual_seed(0)  # the same weights for all of them
            network = (
                change(timm.create_model(model)).to(device).train(phase.startswith("training"))
            )
            dtype = (
                torch.bfloat16
                if "bfloat16" in phase and not name.endswith("float32")
                else torch.float32
            )
            network = network if network.training else network.to(dtype).requires_grad_(False)
            for path, module in network.named_modules():
                if "dropout" in phase and path.endswith("attn_drop"):
                    module.p = 0.1  # the paper's
            x = torch.randn(batch, *resolve_model_data_config(network)["input_size"], device=device)
            x = x.to(next(network.parameters()).dtype)
            function = "model" if change in (unchanged, reparameterize_model) else name
            found[name] = Subject(step(network, x, route, dtype), dtype, function)
            if compile_mode and name == ("as built" if network.training else "folded"):
                torch.compiler.reset()  # it stops compiling a function that it has compiled several times
                compiled = torch.compile(network, mode=compile_mode, dynamic=False, fullgraph=True)
                found["compiled"] = Subject(
                    step(network, x, "", dtype, compiled), dtype, function, found[name].run
                )
        return found

    return Case(model, phase, batch, yardstick, build)


def models(
    names: Iterable[str], batch: int, device: torch.device, compile_mode: str = ""
) -> Iterator[Case]:
    """Networks in all phases. The yardstick of one of attention is its definition, in float32 for inference."""
    for name in names:
        attention = isinstance(timm.create_model(name), SANet)
        for phase in PHASES:
            if not attention and "dropout" in phase:
                continue
            yardstick = "as built"
            variants: Variants = {yardstick: (unchanged, "")}
            if phase.startswith("inference"):
                variants["folded"] = (reparameterize_model, "")
            if attention:
                yardstick = (
                    "definition, float32" if phase == "inference, bfloat16" else "definition"
                )
                variants |= {
                    yardstick: (unchanged, "definition"),
                    "3x3 convolutions": (with_convolutions, ""),
                }
            variants["resnet18_cifar"] = (lambda _: timm.create_model("resnet18_cifar"), "")
            yield networks(name, phase, batch, device, variants, yardstick, compile_mode)


def layers(
    model: str, sides: Iterable[int], device: torch.device, routes: dict[str, str]
) -> Iterator[Case]:
    """One attention layer at inference on one image of SIDE x SIDE tokens, by route.

    The last route is the yardstick. The definition is left out where its maps would fill LARGEST_MAPS bytes.
    """
    for side in sides:
        whole = timm.create_model(model)
        if not isinstance(whole, SANet):
            raise ValueError(f"--side: got {model!r} as the first model, expected one of attention")
        network: Any = timm.create_model(model, depth=1, img_size=side * whole.patch_size)
        layer, dim = network.blocks[0].attn.eval().to(device), network.embed_dim
        fits = 4 * layer.W_val.in_features // dim * side**4 <= LARGEST_MAPS
        chosen = {name: route for name, route in routes.items() if fits or route != "definition"}

        def build(
            layer: Any = layer, chosen: dict[str, str] = chosen, side: int = side, dim: int = dim
        ) -> Subjects:
            X = torch.randn(1, side, side, dim, device=device)
            return {
                name: Subject(step(layer, X, route), function="layer")
                for name, route in chosen.items()
            }

        name = f"one layer of {model}, {side}x{side} tokens"
        yield Case(name, PHASES[0], 1, list(chosen)[-1], build)
