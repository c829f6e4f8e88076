"""python scripts/bench.py routes | convolution | data-path RECIPE [--rounds 9] [--json FILE]

Further cases of the benchmark, on a CPU: the evaluation routes of attention, attention made of a convolution, and what
loading and augmenting images adds to a training step (on the device that accelerate finds).
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import timm
import torch
import typer
from benchmark import Case, Subject, run_cases, step
from suites import LARGEST_MAPS, layers, networks, unchanged
from torch import nn
from torch.nn.functional import cross_entropy

from sa_zoo import attention_from_conv
from sa_zoo.kernels.fused import can_fuse
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import load_config
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.model import create_model, input_format_of
from sa_zoo.training.optimization import optimizer_of
from sa_zoo.training.splits import Split

CPU = torch.device("cpu")
# Routes in the case that the first one exists for; the last is the next simpler one, the yardstick. A route that is
# forced applies to attention; as built, the rest of a block may also be evaluated in portions.
ROUTES = (
    ("sa_quadratic_cifar", "inference, float32", 32, ("fused", "definition", "portions")),
    ("sa_quadratic_cifar", "inference, bfloat16", 32, ("portions", "definition", "by axes")),
    ("sa_quadratic_cifar", "training, float32", 32, ("portions", "definition", "by axes")),
    ("sa_content_cifar", "inference, float32", 16, ("absorbed", "definition")),
    ("sa_content_cifar", "training, float32", 8, ("absorbed", "definition")),
    ("sa_quadratic_gen_cifar", "inference, float32", 1, ("remembered", "definition")),
)
LAYERS = (
    (64, 56),
    (128, 28),
    (256, 14),
    (512, 7),
    (32, 32),
)  # channels, side: ResNet18's stages; a CIFAR layer
ALPHAS = (20.0, 4.0)  # a composed kernel of the convolution's size, and one two pixels larger
IMAGES = 50_000  # CIFAR's number

app = typer.Typer(help=__doc__)
Rounds: TypeAlias = Annotated[int, typer.Option(min=1)]
Json: TypeAlias = Path | None


def route_cases() -> Iterator[Case]:
    X = torch.empty(1, 1, 16, 16)
    for model, phase, batch, routes in ROUTES:
        if "fused" not in routes or can_fuse(
            X, X[0, 0]
        ):  # which needs AVX-512, and a compiler at installation
            subjects = {"as built": (unchanged, "")} | {name: (unchanged, name) for name in routes}
            yield networks(model, phase, batch, CPU, subjects, routes[-1])
    yield from layers(
        "sa_quadratic_cifar", [64], CPU, {"by axes": "by axes", "definition": "definition"}
    )


def convolution_cases() -> Iterator[Case]:
    pair = {
        "mhsa_resnet18": (unchanged, ""),
        "resnet18": (lambda _: timm.create_model("resnet18"), ""),
    }
    for batch in (1, 8):
        yield networks("mhsa_resnet18", "inference, float32", batch, CPU, pair, "resnet18")
    for alpha, batch, (channels, side) in product(ALPHAS, (8, 32), LAYERS):
        name = f"3x3 layer, {channels} channels, {side}x{side}, alpha {alpha:g}"
        yield Case(
            name,
            "training, float32",
            batch,
            "nn.Conv2d",
            partial(layer, channels, side, alpha, batch),
        )


def layer(channels: int, side: int, alpha: float, batch: int) -> dict[str, Subject]:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    attention, x = (
        attention_from_conv(conv, alpha),
        torch.randn(batch, channels, side, side, requires_grad=True),
    )
    found = {"nn.Conv2d": Subject(step(conv, x)), "attention": Subject(step(attention, x))}
    if batch == 8 and 4 * 9 * side**2 * (side + 2) ** 2 <= LARGEST_MAPS:
        found["definition"] = Subject(step(attention, x, compiled=attention.definition))
    return found


@app.command()
def routes(rounds: Rounds = 9, json: Json = None) -> None:
    """Each route against the next simpler one, its yardstick, in the case that it exists for."""
    run_cases(route_cases(), rounds, CPU, f"python scripts/bench.py routes --rounds {rounds}", json)


@app.command()
def convolution(rounds: Rounds = 9, json: Json = None) -> None:
    """mhsa_resnet18 against resnet18, and 3x3 layers at finite alpha against nn.Conv2d, forward and backward."""
    run_cases(
        convolution_cases(),
        rounds,
        CPU,
        f"python scripts/bench.py convolution --rounds {rounds}",
        json,
    )


@app.command()
def data_path(
    recipe: str,
    steps: Annotated[int, typer.Option(min=1)] = 5,
    rounds: Rounds = 9,
    json: Json = None,
) -> None:
    """Steps of a recipe with their images, on one batch, and images alone, whose speed is relative to a whole step."""
    config = load_config(recipe)
    accelerator = open_accelerator(mixed_precision=config.train.precision)
    device = accelerator.device
    model: Any = create_model(config.model, 10)
    model = model.to(device, memory_format=torch.channels_last).train()
    network, optimizer = accelerator.prepare(model, optimizer_of(model, config.optim))
    images = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8, device=device)
    split = Split(images, np.zeros(IMAGES, dtype=np.int64))
    augment = Augment(config.augment, 0, 10, input_format_of(model).normalize, device)
    batches = (
        np.random.default_rng(0)
        .permutation(IMAGES)[: steps * config.train.batch_size]
        .reshape(steps, -1)
    )

    def load():
        return (
            augment(chosen, labels, indices, 0)
            for chosen, labels, indices in split.loader_in_order(batches)
        )

    def train(pairs) -> None:
        for inputs, targets in pairs:
            accelerator.backward(cross_entropy(network(inputs).float(), targets))
            optimizer.step()
            optimizer.zero_grad()

    one = [next(load())] * steps
    runs = {
        "with images": lambda: train(load()),
        "on one batch": lambda: train(one),
        "images": lambda: list(load()),
    }
    subjects = {name: Subject(run) for name, run in runs.items()}
    phase = f"training, {config.train.precision}"
    case = Case(config.model.name, phase, batches.size, "with images", lambda: subjects)
    run_cases(
        [case],
        rounds,
        device,
        f"python scripts/bench.py data-path {recipe} --rounds {rounds}",
        json,
    )


if __name__ == "__main__":
    app()
