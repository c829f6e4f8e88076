"""python scripts/bench_data_path.py configs/sa_quadratic_tiny_cifar.toml [--threads 1] [--steps 20]

Share of a training step that loading and augmenting images takes, for the model, recipe and precision of a config, on
random images of CIFAR's number and size and on the device that accelerate finds.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.training.augment import Augment
from sa_zoo.training.config import load_config
from sa_zoo.training.data import Split
from sa_zoo.training.loop import optimizer_of
from sa_zoo.training.model import create_model, input_format

IMAGES, CLASSES, SIDE = 50_000, 10, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[2])
    parser.add_argument("config", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; all cores if 0")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(f"--steps: got {options.steps}, expected at least 3, of which two are not counted")
    if options.threads:
        torch.set_num_threads(options.threads)
    config = load_config(options.config, [])
    accelerator = Accelerator(mixed_precision=config.train.precision)
    device, batch = accelerator.device, config.train.batch_size
    model = create_model(config.model, CLASSES, None).to(device, memory_format=torch.channels_last).train()
    optimizer = accelerator.prepare(optimizer_of(model, config.optim))
    prepared = accelerator.prepare(model)
    images = torch.randint(256, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8, device=device)
    split = Split(images, np.zeros(IMAGES, dtype=np.int64))
    augment = Augment(config.augment, 0, CLASSES, input_format(model).normalise, device)
    batches = np.random.default_rng(0).permutation(IMAGES)[: options.steps * batch].reshape(-1, batch)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    loading, stepping, start = [], [], now()
    for chosen, labels, indices in split.loader_in_order(batches):
        inputs, targets = augment(chosen, labels, indices, 0)
        loaded = now()
        accelerator.backward(cross_entropy(prepared(inputs).float(), targets))
        optimizer.step()
        optimizer.zero_grad()
        done = now()
        loading.append(loaded - start)
        stepping.append(done - loaded)
        start = done
    share = statistics.median(part / (part + rest) for part, rest in zip(loading[2:], stepping[2:], strict=True))
    step = statistics.median(loading[2:]) + statistics.median(stepping[2:])
    print(
        f"{config.model.name}, batch {batch}, {device}, {torch.get_num_threads()} threads: data {share:.1%} of "
        f"a step of {1e3 * step:.0f} ms (median of {options.steps - 2} steps after two)"
    )


if __name__ == "__main__":
    main()
