"""python scripts/bench_data_path.py CONFIG [--steps 5] [--rounds 9] [--json FILE]

What loading and augmenting images adds to a training step, for the model, recipe and precision of a config, on random
images of CIFAR's number and size. The speed of "images alone" is how many times as long a whole step takes. On a GPU,
which works while the host prepares images, compare "steps on one batch" instead.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch.nn.functional import cross_entropy

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.benchmark import Case, Subject, run_cases
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import load_config
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.model import create_model, input_format_of
from sa_zoo.training.optimization import optimizer_of
from sa_zoo.training.splits import Split

IMAGES, CLASSES, SIDE = 50_000, 10, 32


def main(
    config: str,
    steps: Annotated[int, typer.Option(min=1)] = 5,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    json: Path | None = None,
) -> None:
    recipe = load_config(config)
    accelerator = open_accelerator(mixed_precision=recipe.train.precision)
    model = create_model(recipe.model, CLASSES).to(accelerator.device, memory_format=torch.channels_last).train()
    network, optimizer = accelerator.prepare(model, optimizer_of(model, recipe.optim))
    images = torch.randint(256, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8, device=accelerator.device)
    split = Split(images, np.zeros(IMAGES, dtype=np.int64))
    augment = Augment(recipe.augment, 0, CLASSES, input_format_of(model).normalize, accelerator.device)
    batches = np.random.default_rng(0).permutation(IMAGES)[: steps * recipe.train.batch_size].reshape(steps, -1)

    def load():
        return (augment(chosen, labels, indices, 0) for chosen, labels, indices in split.loader_in_order(batches))

    def train(pairs) -> None:
        for inputs, targets in pairs:
            accelerator.backward(cross_entropy(network(inputs).float(), targets))
            optimizer.step()
            optimizer.zero_grad()

    one = [next(load())] * steps
    subjects = {
        "steps with their images": Subject(lambda: train(load())),
        "steps on one batch": Subject(lambda: train(one)),
        "images alone": Subject(lambda: list(load())),
    }
    phase = f"training, {recipe.train.precision}"
    case = Case(recipe.model.name, phase, batches.size, next(iter(subjects)), lambda: subjects)
    command = f"python scripts/bench_data_path.py {config} --steps {steps} --rounds {rounds}"
    run_cases([case], rounds, accelerator.device, command, json)


if __name__ == "__main__":
    typer.run(main)
