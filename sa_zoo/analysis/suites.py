"""The cases of the benchmark: models, single layers, the evaluation routes of attention, convolutional attention."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator

import timm
import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn

from sa_zoo.analysis.benchmark import Case, Subject, step
from sa_zoo.convolution.layer_conversion import attention_from_conv
from sa_zoo.kernels.fused import can_fuse
from sa_zoo.models.network import SANet

PHASES = (
    "inference, float32",
    "inference, bfloat16",
    "training, float32",
    "training, float32, dropout on probabilities",
    "training, bfloat16",
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's
LARGEST_MAPS = 2**32  # bytes; larger attention maps are not built
# Routes in the case that the first exists for. The last is the next simpler one, the yardstick.
ROUTE_CASES = (
    ("sa_quadratic_cifar", "inference, float32", 32, ("fused", "definition", "portions")),
    ("sa_quadratic_cifar", "inference, bfloat16", 32, ("portions", "definition", "by axes")),
    ("sa_quadratic_cifar", "training, float32", 32, ("portions", "definition", "by axes")),
    ("sa_content_cifar", "inference, float32", 16, ("absorbed", "definition")),
    ("sa_content_cifar", "training, float32", 8, ("absorbed", "definition")),
    ("sa_quadratic_gen_cifar", "inference, float32", 1, ("remembered", "definition")),
)
CONVOLUTIONS = ((64, 56), (128, 28), (256, 14), (512, 7), (32, 32))  # channels, side: ResNet18's stages; a CIFAR layer
ALPHAS = (20.0, 4.0)  # a composed kernel of the convolution's size, and one two pixels larger

Change = Callable[[nn.Module], nn.Module]  # from a registered model to the network that is measured


def check_names(models: Iterable[str], suite: str, phase: str, compile_mode: str) -> None:
    """ValueError for a name that the benchmark does not know."""
    if unknown := [name for name in models if not timm.is_model(name)]:
        ours = ", ".join(timm.list_models(module="timm_models"))
        raise ValueError(f"MODEL: got {unknown[0]!r}, expected a name that timm lists, such as {ours}")
    if suite not in ("models", "routes", "convolution"):
        raise ValueError(f"--suite: got {suite!r}, expected models, routes or convolution")
    if not any(known.startswith(phase) for known in PHASES):
        raise ValueError(f"--phase: got {phase!r}, expected the beginning of one of {', '.join(PHASES)}")
    if compile_mode and compile_mode not in COMPILE_MODES:
        raise ValueError(f"--compile: got {compile_mode!r}, expected one of {', '.join(COMPILE_MODES)}")


class Convolution(nn.Conv2d):
    """A 3x3 convolution of tokens."""

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        return super().forward(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def with_convolutions(network: SANet) -> SANet:
    """A copy with the same channels and feed-forward layers, whose blocks mix pixels by 3x3 convolutions."""
    twin, dim, like = copy.deepcopy(network), network.embed_dim, network.patch_embed.weight
    for block in twin.blocks:
        block.attn = Convolution(dim, dim, 3, padding=1, device=like.device, dtype=like.dtype)
    return twin


def unchanged(network: nn.Module) -> nn.Module:
    return network


def resnet18_cifar(_: nn.Module) -> nn.Module:
    return timm.create_model("resnet18_cifar")


def networks(
    model: str,
    phase: str,
    batch: int,
    device: torch.device,
    subjects: dict[str, tuple[Change, str | None]],
    yardstick: str,
    compile_mode: str = "",
) -> Case:
    """A case of whole networks: by name, what is made of the model, and the route of its layers (None: as they choose).

    A subject whose name ends in "float32" has that type, whatever the phase. compile_mode: also measure the network as
    torch.compile makes it in this mode.
    """

    def build() -> dict[str, Subject]:
        found, network = {}, None
        for name, (change, route) in subjects.items():
            torch.manual_seed(0)  # the same weights for all of them
            network = change(timm.create_model(model)).to(device).train(phase.startswith("training"))
            dtype = torch.bfloat16 if "bfloat16" in phase and not name.endswith("float32") else torch.float32
            network = network if network.training else network.to(dtype)
            for path, module in network.named_modules():
                if "dropout" in phase and path.endswith("attn_drop"):
                    module.p = 0.1  # the paper's
            x = torch.randn(batch, *timm.get_pretrained_cfg(model).input_size, device=device)
            x = x.to(next(network.parameters()).dtype)
            function = "model" if change in (unchanged, reparameterize_model) else name
            found[name] = Subject(step(network, x, route, dtype), dtype, function)
            if compile_mode and name == ("as built" if network.training else "folded"):
                torch.compiler.reset()  # it stops compiling a function that it has compiled several times
                compiled = torch.compile(network, mode=compile_mode, dynamic=False, fullgraph=True)
                found["compiled"] = Subject(step(network, x, None, dtype, compiled), dtype, function, found[name].run)
        return found

    return Case(model, phase, batch, yardstick, build)


def models(names: Iterable[str], batch: int, device: torch.device, compile_mode: str = "") -> Iterator[Case]:
    """Networks in all phases. The yardstick of one of attention is its definition, in float32 for inference."""
    for name in names:
        attention = isinstance(timm.create_model(name), SANet)
        for phase in PHASES:
            subjects: dict[str, tuple[Change, str | None]] = {"as built": (unchanged, None)}
            if phase.startswith("inference"):
                subjects["folded"] = (reparameterize_model, None)
            yardstick = "definition, float32" if phase == "inference, bfloat16" else "definition"
            if attention:
                subjects |= {yardstick: (unchanged, "definition"), "3x3 convolutions": (with_convolutions, None)}
            subjects["resnet18_cifar"] = (resnet18_cifar, None)
            if attention or "dropout" not in phase:
                yield networks(
                    name, phase, batch, device, subjects, yardstick if attention else "as built", compile_mode
                )


def layers(model: str, sides: Iterable[int], device: torch.device, routes: dict[str, str | None]) -> Iterator[Case]:
    """One attention layer at inference on one image of SIDE x SIDE tokens, by route.

    The last route is the yardstick. The definition is left out where its maps would fill LARGEST_MAPS bytes.
    """
    for side in sides:
        whole = timm.create_model(model)
        if not isinstance(whole, SANet):
            raise ValueError(f"--side: got {model!r} as the first model, expected one of attention")
        network = timm.create_model(model, depth=1, img_size=side * whole.patch_size)
        layer, dim = network.blocks[0].attn.eval().to(device), network.embed_dim
        fits = 4 * layer.W_val.in_features // dim * side**4 <= LARGEST_MAPS
        chosen = {name: route for name, route in routes.items() if fits or route != "definition"}

        def build(layer=layer, chosen=chosen, shape=(1, side, side, dim)) -> dict[str, Subject]:
            X = torch.randn(shape, device=device)
            return {name: Subject(step(layer, X, route), function="layer") for name, route in chosen.items()}

        yield Case(f"one layer of {model}", PHASES[0], 1, list(chosen)[-1], build, side**2)


def routes(device: torch.device) -> Iterator[Case]:
    """Each evaluation route of attention against the next simpler one in the case that it exists for."""
    X = torch.empty(1, 1, 16, 16, device=device)
    for model, phase, batch, names in ROUTE_CASES:
        if "fused" in names and not can_fuse(X, X[0, 0]):
            continue  # another processor, or an installation without a compiler
        yield networks(model, phase, batch, device, {name: (unchanged, name) for name in names}, names[-1])
    yield from layers("sa_quadratic_cifar", [64], device, {"by axes": "by axes", "definition": "definition"})


def convolution(device: torch.device) -> Iterator[Case]:
    """Attention made of a convolution against that convolution: ResNet18, and 3x3 layers of a finite alpha."""
    pair: dict[str, tuple[Change, str | None]] = {
        "mhsa_resnet18": (unchanged, None),
        "resnet18": (lambda _: timm.create_model("resnet18"), None),
    }
    for batch in (1, 8):
        yield networks("mhsa_resnet18", PHASES[0], batch, device, pair, "resnet18")
    for alpha in ALPHAS:
        for batch in (8, 32):
            for channels, side in CONVOLUTIONS:

                def build(channels=channels, side=side, alpha=alpha, batch=batch) -> dict[str, Subject]:
                    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, device=device)
                    layer = attention_from_conv(conv, alpha)
                    x = torch.randn(batch, channels, side, side, device=device, requires_grad=True)
                    found = {"nn.Conv2d": Subject(step(conv, x)), "attention": Subject(step(layer, x))}
                    if batch == 8 and 4 * 9 * math.prod([side, side, side + 2, side + 2]) <= LARGEST_MAPS:
                        found["definition"] = Subject(step(layer, x, compiled=layer.explicit))
                    return found

                name = f"3x3 layer, {channels} channels, {side}x{side}, alpha {alpha:g}"
                yield Case(name, "training, float32", batch, "nn.Conv2d", build, side**2)
