"""python scripts/bench.py MODEL [--against CNN] [--deployed] [--side 64] [--convolutions] [--positions 224] [--json F]

Measures time, memory and work of models, each against a yardstick that takes turns with it; docs/benchmarks.md defines
the columns and has the results. Every option that says "also" adds cases; with one of them, MODEL may be left out.
"""

import copy
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import typer
from runs import ALLOCATOR, PLAIN, rivals
from timing import Case, Subject, run_cases, step
from timm.data import resolve_model_data_config
from timm.utils import reparameterize_model
from torch import nn
from torchvision.ops import Permute

import sa_zoo
from sa_zoo.models.network import AttentionNetwork, attention_in
from sa_zoo.models.norm import BatchNorm
from sa_zoo.models.terms import Quadratic
from sa_zoo.training.config import load_config

CPU = torch.device("cpu")
PHASES = (
    "inference, float32",
    "inference, bfloat16",
    "training, float32",
    "training, float32, dropout on probabilities",
    "training, bfloat16",
)
LARGEST_MAPS = 2**32  # bytes; larger attention maps are not built
BATCHES = (1, 8, 50, 256)  # of deployed networks
# Channels and side of the 3x3 layers of ResNet18's stages, and of a layer for CIFAR.
CONVOLUTIONS = ((64, 56), (128, 28), (256, 14), (512, 7), (32, 32))
ALPHAS = (20.0, 4.0)  # a composed kernel of the convolution's size, and one two pixels larger

# Name -> what is made of a registered model, and the route of its layers ("": as they choose).
Variants = dict[str, tuple[Callable[[Any], nn.Module], str]]


def unchanged(network: nn.Module) -> nn.Module:
    return network


def the_model(name: str, _: nn.Module) -> nn.Module:
    """Another model instead."""
    return timm.create_model(name)


def with_convolutions(network: AttentionNetwork) -> AttentionNetwork:
    """A copy whose blocks mix pixels by 3x3 convolutions, with the same channels and all else the same but W_out."""
    twin = copy.deepcopy(network)
    for path, layer in attention_in(twin.blocks).items():
        heads, dim = layer.num_heads, layer.W_val.out_features
        dim_in = layer.W_val.in_features // heads
        convolution = nn.Conv2d(dim_in, dim, 3, padding=1).to(network.patch_embed.weight)
        norm = layer.W_out if isinstance(layer.W_out, BatchNorm) else nn.Identity()
        # tokens are (B, H, W, D)
        mixing = nn.Sequential(Permute([0, 3, 1, 2]), convolution, Permute([0, 2, 3, 1]), norm)
        twin.blocks.set_submodule(path, mixing)
    return twin


def with_taps(network: nn.Module) -> nn.Module:
    """The network with every head on one pixel."""
    sa_zoo.harden(network)
    return network if network.training else reparameterize_model(network)


def is_quadratic(network: nn.Module) -> bool:
    """Whether `with_taps` takes the network."""
    if not isinstance(network, AttentionNetwork):
        return False
    layers = attention_in(network.blocks).values()
    return all(isinstance(layer.terms[0], Quadratic) for layer in layers)


def networks(
    model: str,
    phase: str,
    batch: int,
    device: torch.device,
    variants: Variants,
    yardstick: str,
    compile_mode: str = "",
) -> Case:
    """A case of whole networks, also as torch.compile makes them if there is a mode for it.

    A variant whose name ends in "float32" has that type, whatever the phase.
    """

    def build() -> dict[str, Subject]:
        found: dict[str, Subject] = {}
        for name, (change, route) in variants.items():
            torch.manual_seed(0)  # the same weights for all of them
            half = "bfloat16" in phase and not name.endswith("float32")
            dtype = torch.bfloat16 if half else torch.float32
            network = change(timm.create_model(model).train(phase.startswith("training")))
            # channels last: where convolutions are fastest, and as training has them
            network.to(device, memory_format=torch.channels_last)
            network.train(phase.startswith("training"))
            if not network.training:
                network.to(dtype).requires_grad_(False)
            for path, module in network.named_modules():
                if "dropout" in phase and path.endswith("attn_drop"):
                    module.p = 0.1  # the paper's
            x = torch.randn(batch, *resolve_model_data_config(network)["input_size"], device=device)
            x = x.to(next(network.parameters()).dtype, memory_format=torch.channels_last)
            found[name] = Subject(step(network, x, route, dtype))
            if (
                compile_mode
                and not route
                and name != ("deployed" if network.training else "as built")
            ):
                torch.compiler.reset()  # it stops compiling a function that it has compiled several times
                compiled = torch.compile(network, mode=compile_mode, dynamic=False, fullgraph=True)
                run = step(network, x, "", dtype, compiled)
                found[f"{name}, compiled"] = Subject(run, found[name].run)
        return found

    return Case(model, phase, batch, yardstick, build)


def models(
    names: Iterable[str], cnn: str, batch: int, device: torch.device, compile_mode: str = ""
) -> Iterator[Case]:
    """Networks in all phases, against a CNN; if that is empty, the yardstick of attention is its definition."""
    for name, phase in product(names, PHASES):
        network = timm.create_model(name)
        attention = isinstance(network, AttentionNetwork)
        if "dropout" in phase and (cnn or not attention):
            continue
        yardstick = cnn or "as built"
        variants: Variants = {"as built": (unchanged, "")}
        if phase.startswith("inference"):
            variants["deployed"] = (reparameterize_model, "")
        if cnn:
            variants = {cnn: (partial(the_model, cnn), "")} | variants
            if is_quadratic(network):
                variants["taps"] = (with_taps, "")
        elif attention:
            in_float32 = ", float32" if phase == "inference, bfloat16" else ""
            yardstick = f"definition{in_float32}"
            variants[yardstick] = (unchanged, "definition")
            variants["3x3 convolutions"] = (with_convolutions, "")
            variants["resnet18_cifar"] = (partial(the_model, "resnet18_cifar"), "")
        yield networks(name, phase, batch, device, variants, yardstick, compile_mode)


def deployed(
    names: Iterable[str], cnn: str, device: torch.device, compile_mode: str
) -> Iterator[Case]:
    """Networks of quadratic heads in inference against a CNN; without one, against 3x3 convolutions in their place."""
    rival = (
        {cnn: (partial(the_model, cnn), "")}
        if cnn
        else {"3x3 convolutions": (with_convolutions, "")}
    )
    variants: Variants = rival | {
        "as built": (unchanged, ""),
        "deployed": (reparameterize_model, ""),
        "taps": (with_taps, ""),
    }
    for name, phase, batch in product(names, PHASES[:2], BATCHES):
        yield networks(name, phase, batch, device, variants, next(iter(rival)), compile_mode)


def layers(
    model: str, sides: Iterable[int], batch: int, device: torch.device, phase: str
) -> Iterator[Case]:
    """A layer on SIDE x SIDE tokens by its route, by axes and by its definition, the yardstick.

    The batch has as many tokens as `batch` images of 8x8, and one image at least. The definition is left out where the
    maps of all heads would fill LARGEST_MAPS bytes.
    """
    whole = timm.create_model(model)
    if not isinstance(whole, AttentionNetwork):
        raise ValueError(f"--side: got {model!r} as the first model, expected one of attention")
    for side in sides:
        images = max(1, batch * 64 // side**2)
        network: Any = timm.create_model(model, img_size=side * whole.patch_size)
        layer = next(iter(attention_in(network.blocks).values()))
        dim = layer.W_val.out_features
        heads = layer.num_heads
        routes = {"as built": "", "by axes": "by axes"}
        if 4 * heads * side**4 <= LARGEST_MAPS:
            routes["definition"] = "definition"
        shape = (images, side, side, dim)
        build = partial(_by_route, layer, routes, shape, phase, device)
        name = f"one layer of {model}, {side}x{side} tokens"
        yield Case(name, phase, images, list(routes)[-1], build)


def _by_route(
    layer: Any, routes: dict[str, str], shape: tuple[int, ...], phase: str, device: torch.device
) -> dict[str, Subject]:
    dtype = torch.bfloat16 if "bfloat16" in phase else torch.float32
    layer.to(device).train(phase.startswith("training"))
    X = torch.randn(shape, device=device)
    if layer.training:
        X.requires_grad_()
    else:
        layer.to(dtype)
        X = X.to(dtype)
    found = {}
    for name, route in routes.items():
        found[name] = Subject(step(layer, X, route, dtype))
    return found


def convolutions_as_attention() -> Iterator[Case]:
    """mhsa_resnet18 against resnet18, and 3x3 layers at finite alpha against nn.Conv2d, forward and backward."""
    pair: Variants = {
        "mhsa_resnet18": (unchanged, ""),
        "resnet18": (partial(the_model, "resnet18"), ""),
    }
    for batch in (1, 8):
        yield networks("mhsa_resnet18", "inference, float32", batch, CPU, pair, "resnet18")
    for alpha, batch, (channels, side) in product(ALPHAS, (8, 32), CONVOLUTIONS):
        name = f"3x3 layer, {channels} channels, {side}x{side}, alpha {alpha:g}"
        build = partial(_convolution, channels, side, alpha, batch)
        yield Case(name, "training, float32", batch, "nn.Conv2d", build)


def _convolution(channels: int, side: int, alpha: float, batch: int) -> dict[str, Subject]:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    attention = sa_zoo.attention_from_conv(conv, alpha)
    x = torch.randn(batch, channels, side, side, requires_grad=True)
    return {"nn.Conv2d": Subject(step(conv, x)), "attention": Subject(step(attention, x))}


def positions(sizes: Iterable[int], device: torch.device) -> Iterator[Case]:
    """Two blocks of the vision transformers with positions in results/runs.toml, with three heads of 64 channels."""
    for size, phase in product(sizes, ("inference, float32", "training, float32")):
        images = max(1, 4 * 224**2 // size**2)
        build = partial(_with_positions, size, images, phase, device)
        yield Case(f"ViT, {size // 16}x{size // 16} tokens", phase, images, PLAIN, build)


def _with_positions(size: int, images: int, phase: str, device: torch.device) -> dict[str, Subject]:
    sizes = {"embed_dim": 192, "num_heads": 3, "depth": 2, "patch_size": 16, "img_size": size}
    x = torch.randn(images, 3, size, size, device=device)
    found = {}
    for row in rivals():
        if not row.recipe.endswith("_all"):
            continue
        args = load_config("tiny", row.set.split()).model.args
        network = timm.create_model(row.model, **args | sizes).to(device)
        found[row.name] = Subject(step(network.train(phase.startswith("training")), x))
    return found


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    models_: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="timm names.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device to measure: cpu or cuda.")] = "cpu",
    batch: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 32,
    side: Annotated[
        list[int] | None, typer.Option(help="Also measure one layer on SIDE x SIDE tokens.", min=1)
    ] = None,
    phase: Annotated[
        str, typer.Option(help=f"First words of the phases to measure, of {'; '.join(PHASES)}.")
    ] = "",
    compile_: Annotated[
        str, typer.Option("--compile", help="Also measure torch.compile in this mode.")
    ] = "",
    against: Annotated[
        str, typer.Option(help="CNN that MODEL is measured against, instead of its definition.")
    ] = "",
    deployed_: Annotated[
        bool,
        typer.Option("--deployed", help=f"Measure inference alone, on {BATCHES} images."),
    ] = False,
    convolutions: Annotated[
        bool,
        typer.Option("--convolutions", help="Also measure convolutions as attention, on a CPU."),
    ] = False,
    size: Annotated[
        list[int] | None,
        typer.Option("--positions", help="Also measure positions in a ViT on SIZE x SIZE pixels."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Number of CPU threads; all cores if 0.", min=0)] = 0,
    rounds: Annotated[
        int, typer.Option(help="Turns of each subject; fifty times as many for one image.", min=1)
    ] = 5,
    json: Annotated[Path | None, typer.Option(help="File to add the results to.")] = None,
) -> None:
    names = models_ or []
    if not (names or convolutions or size):
        names = ["sa_quadratic_cifar"]
    if threads:
        torch.set_num_threads(threads)
    place = torch.device(device)
    networks_ = models(names, against, batch, place, compile_)
    if deployed_:
        networks_ = deployed(names, against, place, compile_)
    cases = [case for case in networks_ if case.phase.startswith(phase)]
    for each in PHASES if phase and side else PHASES[:1]:
        if side and each.startswith(phase or each) and "dropout" not in each:
            cases += layers((names or ["sa_quadratic_cifar"])[0], side, batch, place, each)
    if convolutions:
        cases += convolutions_as_attention()
    cases += positions(size or [], place)
    run_cases(cases, rounds, place, shlex.join(["python", "scripts/bench.py", *sys.argv[1:]]), json)


if __name__ == "__main__":
    # glibc reads these when a process starts
    if not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    app()
