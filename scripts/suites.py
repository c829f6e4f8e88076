"""The cases of bench.py: models, also against a CNN, layers, routes, convolutions as attention, images of a recipe."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import timm
import torch
from benchmark import Case, Subject, step
from timm.data import resolve_model_data_config
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.ops import Permute

from sa_zoo import attention_from_conv, harden
from sa_zoo.kernels import fused
from sa_zoo.models.network import SANet, attention_in
from sa_zoo.models.norm import BatchNorm
from sa_zoo.models.terms import Quadratic, kernel_offsets
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import load_config
from sa_zoo.training.device import open_accelerator, with_launched_precision
from sa_zoo.training.model import create_model, input_format_of
from sa_zoo.training.optimization import optimizer_of
from sa_zoo.training.splits import Split

CPU = torch.device("cpu")

PHASES = (
    "inference, float32",
    "inference, bfloat16",
    "training, float32",
    "training, float32, dropout on probabilities",
    "training, bfloat16",
)
LARGEST_MAPS = 2**32  # bytes; larger attention maps are not built
# Routes in the case that the first one exists for; the last is the next simpler one, the yardstick. A route that is
# forced applies to attention; as built, the rest of a block may also be evaluated in portions.
ROUTES = (
    ("sa_quadratic_cifar", "inference, float32", 32, ("fused", "definition", "recomputed")),
    ("sa_quadratic_cifar", "inference, bfloat16", 32, ("recomputed", "definition", "by axes")),
    ("sa_quadratic_cifar", "training, float32", 32, ("recomputed", "definition", "by axes")),
    ("sa_content_cifar", "inference, float32", 16, ("absorbed", "definition")),
    ("sa_content_cifar", "training, float32", 8, ("absorbed", "definition")),
)
# Channels and side of the 3x3 layers of ResNet18's stages, and of a layer for CIFAR.
CONVOLUTIONS = ((64, 56), (128, 28), (256, 14), (512, 7), (32, 32))
ALPHAS = (20.0, 4.0)  # a composed kernel of the convolution's size, and one two pixels larger
STEPS = 5  # of a recipe
IMAGES = 50_000  # CIFAR's number

Subjects = dict[str, Subject]
# Name -> what is made of a registered model, and the route of its layers ("": as they choose).
Variants = dict[str, tuple[Callable[[Any], nn.Module], str]]


def check_names(models: Iterable[str], phase: str) -> None:
    """Raise ValueError for a model or a phase that the benchmark does not know."""
    unknown = [name for name in models if not timm.is_model(name)]
    if unknown:
        ours = ", ".join(timm.list_models(module="timm_models"))
        raise ValueError(
            f"MODEL: got {unknown[0]!r}, expected a name that timm lists, such as {ours}"
        )
    if not any(known.startswith(phase) for known in PHASES):
        raise ValueError(
            f"--phase: got {phase!r}, expected the beginning of one of {', '.join(PHASES)}"
        )


def with_convolutions(network: SANet) -> SANet:
    """A copy whose blocks mix pixels by 3x3 convolutions, with the same channels and all else the same but W_out."""
    twin = copy.deepcopy(network)
    for path, layer in attention_in(twin.blocks).items():
        dim = layer.W_val.out_features
        convolution = nn.Conv2d(dim, dim, 3, padding=1).to(network.patch_embed.weight)
        norm = layer.W_out if isinstance(layer.W_out, BatchNorm) else nn.Identity()
        # tokens are (B, H, W, D)
        mixing = nn.Sequential(Permute([0, 3, 1, 2]), convolution, Permute([0, 2, 3, 1]), norm)
        twin.blocks.set_submodule(path, mixing)
    return twin


def unchanged(network: nn.Module) -> nn.Module:
    return network


def with_taps(network: nn.Module) -> nn.Module:
    """The network with its heads as taps, for inference."""
    harden(network)
    return reparameterize_model(network)


def with_kernels(network: SANet) -> SANet:
    """The network with the taps of a 3x3 kernel in each layer, the closest to its center if it has fewer heads."""
    for layer in attention_in(network.blocks).values():
        term = layer.terms[0]
        term.Delta.data.copy_(kernel_offsets(len(term.Delta)))
        term.spread.data.fill_(3.0)
    harden(network)
    return network


def with_folded_kernels(network: SANet) -> nn.Module:
    """The same for inference."""
    return reparameterize_model(with_kernels(network))


def is_quadratic(network: nn.Module) -> bool:
    """Whether `with_kernels` takes the network."""
    return isinstance(network, SANet) and all(
        isinstance(layer.terms[0], Quadratic) for layer in attention_in(network.blocks).values()
    )


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
            half = "bfloat16" in phase and not name.endswith("float32")
            dtype = torch.bfloat16 if half else torch.float32
            network = change(timm.create_model(model)).to(device)
            network.train(phase.startswith("training"))
            if not network.training:
                network.to(dtype).requires_grad_(False)
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
                run = step(network, x, "", dtype, compiled)
                found["compiled"] = Subject(run, dtype, function, found[name].run)
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
                in_float32 = ", float32" if phase == "inference, bfloat16" else ""
                yardstick = f"definition{in_float32}"
                variants[yardstick] = (unchanged, "definition")
                variants["3x3 convolutions"] = (with_convolutions, "")
            variants["resnet18_cifar"] = (lambda _: timm.create_model("resnet18_cifar"), "")
            yield networks(name, phase, batch, device, variants, yardstick, compile_mode)


def against(cnn: str, names: Iterable[str], batch: int, device: torch.device) -> Iterator[Case]:
    """Networks against a CNN, the yardstick; those of quadratic heads also as a CNN of 3x3 kernels."""
    for name, phase in product(names, PHASES):
        if "dropout" in phase:
            continue
        variants: Variants = {cnn: (lambda _: timm.create_model(cnn), "")}
        variants["as built"] = (unchanged, "")
        inference = phase.startswith("inference")
        if inference:
            variants["folded"] = (reparameterize_model, "")
        if is_quadratic(timm.create_model(name)):
            change = with_folded_kernels if inference else with_kernels
            variants["taps of a 3x3 kernel"] = (change, "")
        yield networks(name, phase, batch, device, variants, cnn)


def layers(
    model: str,
    sides: Iterable[int],
    device: torch.device,
    routes: dict[str, str],
    phase: str = PHASES[0],
    pixels: int = 1,
) -> Iterator[Case]:
    """One attention layer on images of SIDE x SIDE tokens, by route: one image, or so many that they have `pixels`.

    The last route is the yardstick. The definition is left out where its maps would fill LARGEST_MAPS bytes.
    """
    for side in sides:
        images = max(1, pixels // side**2)
        whole = timm.create_model(model)
        if not isinstance(whole, SANet):
            raise ValueError(f"--side: got {model!r} as the first model, expected one of attention")
        dim, _, num_heads, hidden_dim = whole.layout.stages[0]
        network: Any = timm.create_model(
            model,
            embed_dim=dim,
            depth=1,
            num_heads=num_heads,
            hidden_dim=hidden_dim,
            img_size=side * whole.patch_size,
        )
        layer = network.blocks[0].attn.train(phase.startswith("training")).to(device)
        fits = 4 * num_heads * side**4 <= LARGEST_MAPS
        chosen = {name: route for name, route in routes.items() if fits or route != "definition"}

        dtype = torch.bfloat16 if "bfloat16" in phase else torch.float32
        build = partial(_by_route, layer, chosen, (images, side, side, dim), dtype, device)
        name = f"one layer of {model}, {side}x{side} tokens"
        yield Case(name, phase, images, list(chosen)[-1], build)


def _by_route(
    layer: Any,
    routes: dict[str, str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Subjects:
    X = torch.randn(shape, device=device)
    if layer.training:
        X.requires_grad_()
    else:
        layer.to(dtype)
        X = X.to(dtype)
    return {
        name: Subject(step(layer, X, route, dtype), dtype, "layer")
        for name, route in routes.items()
    }


def routes() -> Iterator[Case]:
    """Each route against the next simpler one, its yardstick, in the case that it exists for, on a CPU."""
    for model, phase, batch, names in ROUTES:
        if "fused" in names and fused.LIBRARY is None:
            continue  # it needs AVX-512, and a compiler at installation
        subjects = {"as built": (unchanged, "")} | {name: (unchanged, name) for name in names}
        yield networks(model, phase, batch, CPU, subjects, names[-1])
    taps: Variants = {
        "as built": (unchanged, ""),
        "folded": (reparameterize_model, ""),
        "taps": (with_taps, ""),
        "taps of a 3x3 kernel": (with_folded_kernels, ""),
        "3x3 convolutions": (with_convolutions, ""),
    }
    for model in ("sa_quadratic_cifar", "sa_quadratic_kernel_tiny_cifar"):
        yield networks(model, "inference, bfloat16", 32, CPU, taps, "3x3 convolutions")
    pair = {"by axes": "by axes", "definition": "definition"}
    yield from layers("sa_quadratic_cifar", [64], CPU, pair)


def convolutions() -> Iterator[Case]:
    """mhsa_resnet18 against resnet18, and 3x3 layers at finite alpha against nn.Conv2d, forward and backward."""
    pair: Variants = {
        "mhsa_resnet18": (unchanged, ""),
        "resnet18": (lambda _: timm.create_model("resnet18"), ""),
    }
    for batch in (1, 8):
        yield networks("mhsa_resnet18", "inference, float32", batch, CPU, pair, "resnet18")
    for alpha, batch, (channels, side) in product(ALPHAS, (8, 32), CONVOLUTIONS):
        name = f"3x3 layer, {channels} channels, {side}x{side}, alpha {alpha:g}"
        build = partial(_convolution, channels, side, alpha, batch)
        yield Case(name, "training, float32", batch, "nn.Conv2d", build)


def _convolution(channels: int, side: int, alpha: float, batch: int) -> Subjects:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    attention = attention_from_conv(conv, alpha)
    x = torch.randn(batch, channels, side, side, requires_grad=True)
    found = {"nn.Conv2d": Subject(step(conv, x)), "attention": Subject(step(attention, x))}
    if batch == 8 and 4 * 9 * side**2 * (side + 2) ** 2 <= LARGEST_MAPS:
        found["definition"] = Subject(step(attention, x, compiled=attention.definition))
    return found


def recipe(name: str, device: torch.device) -> Case:
    """Steps of a recipe with their images, on one batch, and images alone, whose speed is relative to a whole step.

    Raises ValueError for another device than recipes train on, here.
    """
    config = with_launched_precision(load_config(name))
    build = partial(_with_images, config)
    found = open_accelerator().device.type
    if device.type != found:
        raise ValueError(f"--device: got {device.type}, expected {found}, where recipes train")
    images = STEPS * config.train.batch_size
    phase = f"training, {config.train.precision}"
    return Case(config.model.name, phase, images, "with images", build)


def _with_images(config: Any) -> Subjects:
    accelerator = open_accelerator(mixed_precision=config.train.precision)
    device = accelerator.device
    model: Any = create_model(config.model, 10)
    model = model.to(device, memory_format=torch.channels_last).train()
    network, optimizer = accelerator.prepare(model, optimizer_of(model, config.optim))
    images = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8, device=device)
    split = Split(images, np.zeros(IMAGES, dtype=np.int64))
    augment = Augment(config.augment, 0, 10, input_format_of(model).normalize)
    chosen = np.random.default_rng(0).permutation(IMAGES)[: STEPS * config.train.batch_size]
    batches = chosen.reshape(STEPS, -1)

    def load() -> Iterator[tuple[Tensor, Tensor]]:
        for decoded, labels, indices in split.loader_in_order(batches):
            yield augment(decoded, labels, indices, 0)

    def train(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for inputs, targets in pairs:
            accelerator.backward(cross_entropy(network(inputs).float(), targets))
            optimizer.step()
            optimizer.zero_grad()

    one = [next(load())] * STEPS
    return {
        "with images": Subject(lambda: train(load())),
        "on one batch": Subject(lambda: train(one)),
        "images": Subject(lambda: list(load())),
    }
