"""python scripts/first_step.py [FILES]

Prints the CPU seconds of a process from its start to the end of its first training step on so many small JPEG files,
which are decoded in the process: with this package, and with timm's data set, loader and model alone.
"""

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 21
MODEL, SIDE, BATCH = "test_resnet", 224, 16  # at this size, 21,000 images are too large to keep


def make_files(folder: Path, count: int) -> None:
    """Files of one picture, as its content does not matter, in folders of classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content := io.BytesIO(), "JPEG")
    for number in range(CLASSES):
        (folder / f"class{number}").mkdir()
    for number in range(count):
        path = folder / f"class{number % CLASSES}" / f"{number}.jpg"
        path.write_bytes(content.getvalue())


def step_of_sa_zoo(folder: str) -> None:
    from sa_zoo import train
    from sa_zoo.training.loop import Run

    step = Run.step

    def first_step(run: Run, batches: list) -> None:
        step(run, batches)
        print(time.process_time())
        sys.exit()

    Run.step = first_step
    changes = [f"model.name={MODEL}", "model.init=''", "train.head_epochs=0", "data.workers=0"]
    changes += [f"data.image_size={SIDE}", f"train.batch_size={BATCH}"]
    with tempfile.TemporaryDirectory() as out:
        train("photographs", out, data=f"{folder}/images", changes=changes)


def step_of_timm(folder: str) -> None:
    import timm
    import torch
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2

    data = create_dataset("", f"{folder}/images")
    sizes = {"input_size": (3, SIDE, SIDE), "batch_size": BATCH, "is_training": True}
    options = {"num_workers": 0, "persistent_workers": False, "use_prefetcher": False}
    network = timm.create_model(MODEL, num_classes=CLASSES)
    optimizer = create_optimizer_v2(network, "sgd", lr=0.1)
    images, labels = next(iter(create_loader(data, **sizes, **options)))
    torch.nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
    print(time.process_time())


SUBJECTS = {"sa_zoo": step_of_sa_zoo, "timm": step_of_timm}


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "images").mkdir()
        make_files(Path(folder, "images"), count)
        for name in [*SUBJECTS] * 2:  # the second time, all files of Python are cached
            command = [sys.executable, __file__, name, folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            print(f"{count} files, {name}: {float(done.stdout):.1f} CPU seconds", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SUBJECTS:
        SUBJECTS[sys.argv[1]](sys.argv[2])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 100_000)
