"""python scripts/reproduce.py --out RUNS --data DATA --title 'CIFAR-10 (JPEG q75 copy)' [--tiny] [--jobs 2]

Trains every row of the table of results, in order: one run folder per row and seed, ROW-SEED, in RUNS. Stop it at any
time (Ctrl-C, SIGTERM or power failure) and run it again: finished runs stay as they are, others resume. DATA is a
folder or a Hub data set. Each run has one thread unless OMP_NUM_THREADS is set, and its log in RUNS/logs.
"""

import argparse
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import load_dataset
from PIL import Image
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[1]
# For models that take images of one size only; terms that look at content take 2.4 times the work of the recipe
ONE_SIZE = "train.epochs=16 augment.small_epochs=0"
# The work of 22 epochs of the CNN, whose small epochs are 14
EPOCHS = "train.epochs=28 augment.small_epochs=18"
PYRAMID = f"model.name=sa_pyramid_tiny_cifar {EPOCHS}"
PYRAMID_H5 = f"model.name=sa_pyramid_h5_tiny_cifar {EPOCHS}"
CNN = "model.name=resnet_tiny_cifar train.epochs=22"
# For a network that fits its training images too well
MIXED = "augment.mixup=0.2"
ABLATION = "train.epochs=8 augment.small_epochs=0"
DIGITS = "data.name=data/digits data.title=digits augment.flip=false"
TENTH = "data/tenth"  # every tenth training image, drawn, and all test images
# A small vision transformer of timm, with 8x8 tokens, and what its rows add
VIT = (
    "model.args.img_size=32 model.args.patch_size=4 model.args.embed_dim=96 model.args.num_heads=6 "
    "model.args.depth=6 model.args.class_token=false model.args.global_pool=avg "
    "model.whiten=false augment.small_epochs=0 optim.lr=0.006"
)
VITS = {
    "vit_tiny_patch16_224.timm": "",
    "local_vit.quadratic": "model.args.start=quadratic model.args.blocks=[0,1,2]",
    "local_vit.positions": "model.args.alpha=1.0",
    "local_vit.both": "model.args.start=quadratic model.args.alpha=1.0",
}
# Epochs of all images, and of a tenth of them in a third of the steps
VIT_SHARES = {"all": "train.epochs=3", "tenth": f"train.epochs=10 data.name={TENTH}"}
# Score terms that are compared after 8 epochs, and seeds
SCORES = {
    "quadratic": 3,
    "quadratic_kernel": 3,
    "content": 3,
    "content_kernel": 3,
    "quadratic_gen": 1,
    "learned": 1,
    "absolute": 1,
    "eq8": 1,
}
# One thread per run; and glibc keeps the memory of a step for the next one instead of returning it to the system.
# Narrow heads of vision transformers are slow in fused attention on a CPU.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TIMM_FUSED_ATTN": "0",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
}


class Row(NamedTuple):
    """`sa-zoo COMMAND --set SETTING ...` for each seed, once the run `after` is finished."""

    name: str
    command: str
    settings: str = ""
    seeds: int = 1
    after: str = ""


TINY = [
    Row("sa_pyramid_h5_tiny_cifar", "train tiny", f"{PYRAMID_H5} {MIXED}", seeds=5),
    Row("resnet_tiny_cifar", "train tiny", CNN, seeds=5),
]
ROWS = [
    *TINY,
    # What mixup does to each of them
    Row("sa_pyramid_h5_tiny_cifar.unmixed", "train tiny", PYRAMID_H5),
    Row(
        "sa_pyramid_h5_tiny_cifar.cutmix", "train tiny", f"{PYRAMID_H5} {MIXED} augment.cutmix=1.0"
    ),
    Row("resnet_tiny_cifar.mixup", "train tiny", f"{CNN} {MIXED}"),
    Row("sa_pyramid_tiny_cifar", "train tiny", PYRAMID, seeds=2),
    # The work of 100 epochs of 32x32 images, mixed as small networks need it for so long (CCT's recipe does the same)
    Row(
        "sa_pyramid_h5_tiny_cifar.long",
        "train tiny",
        "model.name=sa_pyramid_h5_tiny_cifar train.epochs=168 augment.small_epochs=108 "
        "augment.mixup=0.8 augment.cutmix=1.0",
    ),
    # What learning where to look gains: the same networks with every head on one pixel from the start
    Row("sa_pyramid_tiny_cifar.taps", "train tiny", f"{PYRAMID} model.harden=true"),
    Row(
        "sa_pyramid_h5_tiny_cifar.taps",
        "train tiny",
        f"{PYRAMID_H5} {MIXED} model.harden=true",
        seeds=5,
    ),
    # Attention in the architecture of the CNN
    Row(
        "mhsa_resnet_tiny_cifar.scratch",
        "train tiny",
        "model.name=mhsa_resnet_tiny_cifar model.args.alpha=2.0 model.args.layers=layer* "
        "train.epochs=22",
    ),
    # What the CNN gains from twice the work
    Row(
        "resnet_tiny_cifar.twice",
        "train tiny",
        "model.name=resnet_tiny_cifar train.epochs=44 augment.small_epochs=28",
    ),
    Row("sa_quadratic_tiny_cifar", "train tiny", seeds=3),
    # Fine-tuning on 1,000 images, and training on them from scratch
    Row(
        "sa_quadratic_tiny_cifar.digits",
        "train finetune_folder",
        f"{DIGITS} model.init=local-dir:sa_quadratic_tiny_cifar-0",
        seeds=3,
        after="sa_quadratic_tiny_cifar-0",
    ),
    Row(
        "sa_quadratic_tiny_cifar.digits_scratch",
        "train finetune_folder",
        f"{DIGITS} model.init= model.freeze= optim.layer_decay=1.0",
        seeds=3,
    ),
    Row(
        "sa_quadratic_kernel_tiny_cifar",
        "train tiny",
        "model.name=sa_quadratic_kernel_tiny_cifar",
        seeds=3,
    ),
    Row(
        "sa_learned_tiny_cifar",
        "train tiny",
        f"model.name=sa_learned_tiny_cifar {ONE_SIZE}",
        seeds=3,
    ),
    Row("sa_content_tiny_cifar", "train tiny", f"model.name=sa_content_tiny_cifar {ONE_SIZE}"),
    Row(
        "sa_quadratic_tiny_cifar.long",
        "train tiny",
        "train.epochs=144 augment.small_epochs=87 augment.mixup=0.8 augment.cutmix=1.0",
    ),
    Row("resnet18_cifar", "train resnet18_cifar", "train.epochs=16 data.validation=0.1"),
    Row("mhsa_resnet18_cifar", "convert resnet18_cifar-0", after="resnet18_cifar-0"),
    Row("sa_mixed_tiny_cifar", "train tiny", f"model.name=sa_mixed_tiny_cifar {ONE_SIZE}"),
    # Which term costs accuracy?
    *(
        Row(
            f"sa_{terms}_tiny_cifar.8epochs",
            "train tiny",
            f"model.name=sa_{terms}_tiny_cifar {ABLATION}",
            seeds,
        )
        for terms, seeds in SCORES.items()
    ),
    Row(
        "mhsa_resnet18_cifar.start",
        "convert resnet18_cifar-0 --layers layer3.*,layer4.* --alpha 4 --content",
        after="resnet18_cifar-0",
    ),
    Row(
        "mhsa_resnet18_cifar.content",
        "train mhsa_resnet_tiny_cifar",
        "model.name=mhsa_resnet18_cifar model.init=local-dir:mhsa_resnet18_cifar.start-0 train.epochs=2",
        after="mhsa_resnet18_cifar.start-0",
    ),
    # What two more epochs give the CNN itself
    Row(
        "resnet18_cifar.tuned",
        "train mhsa_resnet_tiny_cifar",
        "model.name=resnet18_cifar model.init=local-dir:resnet18_cifar-0 train.epochs=2",
        after="resnet18_cifar-0",
    ),
    # Vision transformers from four starts, and with positions
    *(
        Row(
            f"{name}_{share}",
            "train tiny",
            f"model.name={name.partition('.')[0]} {VIT} {more} {length}",
            seeds=3,
        )
        for share, length in VIT_SHARES.items()
        for name, more in VITS.items()
    ),
]


def finished(run: Path) -> bool:
    """A run's card is written last."""
    return (run / "README.md").is_file() and (run / "metrics.json").is_file()


def command_of(row: Row, seed: int, data: str, title: str) -> list[str]:
    """The command of a run, for the working directory RUNS. Its config names no path of this machine."""
    command = [*shlex.split(row.command), "--out", f"{row.name}-{seed}"]
    if command[0] == "convert":
        return [*command, "--data", data]
    settings = [
        f"data.name={data}",
        f"data.title={title}",
        *row.settings.split(),
        f"train.seed={seed}",
    ]
    settings.append("train.checkpoint_steps=200")
    return command + [word for setting in settings for word in ("--set", setting)]


def unfinished(
    rows: list[Row], runs: Path, data: str, title: str
) -> dict[str, tuple[Row, list[str]]]:
    """Row and command of each run that is not finished, by name."""
    jobs = [
        (row, seed)
        for row in rows
        for seed in range(row.seeds)
        if not finished(runs / f"{row.name}-{seed}")
    ]
    return {f"{row.name}-{seed}": (row, command_of(row, seed, data, title)) for row, seed in jobs}


def start(command: list[str], runs: Path, name: str, lock: int) -> subprocess.Popen[bytes]:
    if (runs / name / "train.toml").is_file():
        command = [*command, "--resume"]
    elif (runs / name).exists():  # a conversion that was interrupted; it takes a minute
        shutil.rmtree(runs / name)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (runs / "logs" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "sa_zoo", *command],
            cwd=runs,
            env={**ENVIRONMENT, **os.environ, "PYTHONPATH": paths},
            stdout=log,
            stderr=log,
            pass_fds=[lock],  # held by every run, also if this script is killed
            process_group=0,  # so that Ctrl-C reaches this script alone
        )


def work(waiting: dict[str, tuple[Row, list[str]]], runs: Path, jobs: int, lock: int) -> list[str]:
    """Run everything that waits, `jobs` at a time; returns the names of the runs that failed or could not start."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed = []
    try:
        while running or waiting:
            for name, process in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    if not finished(runs / name):
                        failed.append(name)
                    print(
                        time.strftime("%H:%M:%S"),
                        "failed" if name in failed else "finished",
                        name,
                        flush=True,
                    )
            ready = [
                name
                for name, (row, _) in waiting.items()
                if not row.after or finished(runs / row.after)
            ]
            if not (ready or running):
                return [*failed, *waiting]
            for name in ready[: jobs - len(running)]:
                print(time.strftime("%H:%M:%S"), "started", name, flush=True)
                running[name] = start(waiting.pop(name)[1], runs, name, lock)
            time.sleep(1)
    finally:
        for process in running.values():
            process.terminate()  # it saves a checkpoint
        for process in running.values():
            process.wait()
    return failed


def write_digits(folder: Path, n: int = 1000) -> None:
    """scikit-learn's digits as a folder of PNG files: n to train on, the others to test on."""
    images, labels = load_digits(return_X_y=True)
    for i, (pixels, label) in enumerate(zip(images.reshape(-1, 8, 8), labels, strict=True)):
        place = folder / ("train" if i < n else "test") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * (255 / 16)).round().astype("uint8")).save(place / f"{i:04d}.png")


def write_tenth(data: str, folder: Path) -> None:
    """A tenth of the training images of a data set, and its test images, as parquet files."""
    splits = load_dataset(data)
    images = len(splits["train"])
    drawn = np.random.default_rng(0).permutation(images)[: images // 10]
    splits["train"] = splits["train"].select(np.sort(drawn))
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("test", "train"):
        path = folder / f"{split}.parquet"
        temporary = path.with_suffix(".new")
        splits[split].to_parquet(temporary)
        temporary.rename(path)


def name_of_data(data: str, runs: Path) -> str:
    """What runs call the data: the same on every machine, by a link if it is a folder."""
    if not Path(data).is_dir():
        return data
    link = runs / "data" / "cifar10"
    if not link.is_symlink():
        link.symlink_to(Path(data).resolve())
    elif link.resolve() != Path(data).resolve():
        sys.exit(f"--data: got {data}, expected {link.resolve()}, as the runs in {runs} have")
    return "data/cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", default="uoft-cs/cifar10", help="folder or Hub data set")
    parser.add_argument("--title", default="", help="what results call the data")
    parser.add_argument("--tiny", action="store_true", help="the first two models only")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    args = parser.parse_args()
    runs, rows = args.out, TINY if args.tiny else ROWS
    for folder in ("logs", "data"):
        (runs / folder).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (runs / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = name_of_data(args.data, runs)
            if not args.tiny:
                write_digits(runs / "data" / "digits")
                if not (runs / TENTH / "train.parquet").is_file():
                    write_tenth(data, runs / TENTH)
            failed = work(unfinished(rows, runs, data, args.title), runs, args.jobs, lock.fileno())
        except BlockingIOError:
            sys.exit(
                f"--out: got {runs}, in which runs are still going on; wait for them, or stop them"
            )
        except KeyboardInterrupt:
            sys.exit("stopped; the same command continues")
    if failed:
        sys.exit(f"failed, see their logs in {runs / 'logs'}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
