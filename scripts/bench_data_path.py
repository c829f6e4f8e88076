"""python scripts/bench_data_path.py tiny [--threads 1] [--steps 5] [--rounds 9]

What loading and augmenting images adds to a training step, for the model, recipe and precision of a config, on random
images of CIFAR's number and size, on the device that accelerate finds. Three loops take turns: steps with their images,
steps on a batch that is there already, and images without steps. On a CPU the last one's share of the first is what
counts; a GPU works while the host prepares, so there it is the share by which the first is longer than the second.
Compiled: accelerate launch --dynamo_backend inductor scripts/bench_data_path.py ...
"""

import argparse
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.timing import in_turns
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import load_config
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.model import create_model, input_format_of
from sa_zoo.training.optimization import optimizer_of
from sa_zoo.training.splits import Split

IMAGES, CLASSES, SIDE = 50_000, 10, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[2])
    parser.add_argument("config", help="TOML file, or the name of a recipe")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; all cores if 0")
    parser.add_argument("--steps", type=int, default=5, help="in a turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns, after one that is not counted")
    options = parser.parse_args()
    if min(options.steps, options.rounds) < 1:
        parser.error(f"--steps, --rounds: got {options.steps} and {options.rounds}, expected at least 1")
    if options.threads:
        torch.set_num_threads(options.threads)
    config = load_config(options.config, [])
    accelerator = open_accelerator(mixed_precision=config.train.precision)
    device, batch = accelerator.device, config.train.batch_size
    model = create_model(config.model, CLASSES).to(device, memory_format=torch.channels_last).train()
    optimizer = accelerator.prepare(optimizer_of(model, config.optim))
    prepared = accelerator.prepare(model)
    images = torch.randint(256, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8, device=device)
    split = Split(images, np.zeros(IMAGES, dtype=np.int64))
    augment = Augment(config.augment, 0, CLASSES, input_format_of(model).normalize, device)
    batches = np.random.default_rng(0).permutation(IMAGES)[: options.steps * batch].reshape(-1, batch)

    def step(inputs: Tensor, targets: Tensor) -> None:
        accelerator.backward(cross_entropy(prepared(inputs).float(), targets))
        optimizer.step()
        optimizer.zero_grad()

    def loaded() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen, labels, indices in split.loader_in_order(batches):
            yield augment(chosen, labels, indices, 0)

    there = next(loaded())
    runs = {
        "with their images": lambda: [step(*some) for some in loaded()],
        "on one batch": lambda: [step(*there) for _ in batches],
        "images alone": lambda: [None for _ in loaded()],
    }
    times = in_turns(runs, options.rounds, device)
    whole = times["with their images"]
    share = statistics.median(1 - bare / full for bare, full in zip(times["on one batch"], whole, strict=True))
    alone = statistics.median(data / full for data, full in zip(times["images alone"], whole, strict=True))
    print(
        f"{config.model.name}, batch {batch}, {device}, {torch.get_num_threads()} threads: "
        f"{1e3 * statistics.median(whole) / len(batches):.1f} ms a step, of which its images make up {share:.1%}; "
        f"alone they take {alone:.1%} of it (medians of {options.rounds} turns of {len(batches)} steps)"
    )


if __name__ == "__main__":
    main()
