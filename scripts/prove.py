"""python scripts/prove.py kill | disk | processes | numbers | load

Proves what README.md says about reliability: each command breaks real runs in one way, many times, compares what is
left with an undisturbed run, and writes docs/reliability/COMMAND.json, from which docs/reliability.md is rendered.
"""

import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from PIL import Image
from reliability import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from damage import DAMAGES, tmpfs
from killed_runs import (
    EVERYTHING,
    Kill,
    beside,
    differences,
    finish,
    resumed,
    said,
    start,
    state_of,
)
from tiny_runs import MUON, tiny_config

from sa_zoo.folders.write import damage
from sa_zoo.training import splits
from sa_zoo.training.augment import ORDER, permutation
from sa_zoo.training.config import dump_config
from sa_zoo.training.model import create_model, input_format_of
from sa_zoo.training.sources import open_source
from sa_zoo.training.train import train

PACKAGES = ("torch", "timm", "transformers", "accelerate", "datasets", "safetensors", "numpy")
PHASES = {
    "saving a checkpoint": r"checkpoints/\.?epoch",
    "writing the model folder": r"\.(model\.safetensors|config\.json|sha256\.json|metrics\.json)",
    "finishing (code, figures, card)": r"\.py|figures|README|preprocessor",
}
BOUND = 64  # MiB that memory may grow after the first tenth of an epoch
GRACE = 30.0  # seconds that torchrun gives the other processes when one has failed
# A run that does not depend on the number of processes, but for rounding.
CURVE: dict[str, dict[str, Any]] = {
    "augment": {"crop_padding": 1, "flip": True},
    "optim": {"name": "sgd", "lr": 0.05},
    "train": {"epochs": 3, "batch_size": 240, "checkpoint_steps": 2},
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def command() -> str:
    return shlex.join(["python", "scripts/prove.py", *sys.argv[1:]])


def phase_of(change: str) -> str:
    return next(
        (name for name, pattern in PHASES.items() if re.search(pattern, change)), "anything else"
    )


def write_config(folder: Path) -> Path:
    (folder / "run.toml").write_text(dump_config(tiny_config(**EVERYTHING)))
    return folder / "run.toml"


@app.command()
def kill(
    times: Annotated[int, typer.Option(help="Number of kills.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the moments.")] = 0,
) -> None:
    """Kill runs of one and two processes at random changes of their files and random times, and resume them."""
    began, generator, tried, lost = (
        time.perf_counter(),
        random.Random(seed),
        Counter[tuple[str, str]](),
        0,
    )
    with TemporaryDirectory() as folder:
        config, expected, changes, seconds = write_config(Path(folder)), {}, {}, {}
        for processes in (1, 2):
            out = Path(folder) / f"whole{processes}"
            resumed(config, out, processes)
            begin = time.perf_counter()
            resumed(config, out.with_name(f"{out.name}again"), processes)
            seconds[processes] = time.perf_counter() - begin
            expected[processes] = state_of(out)
            changes[processes] = beside(out, "-changes.log").read_text().splitlines()
        for trial in range(times):
            processes, number = (
                1 + trial % 2,
                (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[trial // 2 % 3],
            )
            if trial % 5 == 4:  # at any time, in any process
                moment = Kill(
                    number,
                    0,
                    generator.uniform(0.05, seconds[processes]),
                    generator.randrange(processes),
                )
                what = "at a random time"
            else:  # at any change of a file, or while it is made
                at = generator.randrange(len(changes[processes]))
                moment = Kill(number, 1 + at, generator.choice([0.0, generator.random() * 0.02]))
                what = phase_of(changes[processes][at])
            out = Path(folder) / f"run{trial}"
            codes = finish(start(config, out, moment, processes), GRACE)
            resumed(config, out, processes)
            found = differences(out, expected[processes]) + ["a traceback"] * (70 in codes)
            lost += bool(found)
            outcome = f"lost: {', '.join(found)}" if found else "resumed to the same bits"
            if any(codes) or found:  # otherwise the run ended before
                tried[f"{moment.number.name}, {what}", outcome] += 1
            print(
                f"{trial + 1}/{times} {moment} {what}: exit codes {codes}, {found or 'nothing'} lost",
                flush=True,
            )
            if found:
                print(said(out))
            for path in Path(folder).glob(f"{out.name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    rows = [(name, count, outcome) for (name, outcome), count in sorted(tried.items())]
    what = "Runs of one and two processes are killed and resumed. Weights, optimizer state, average, history, record of"
    what += " heads and results equal those of an undisturbed run bit for bit; no temporary or empty file is left."
    record("kill", what, command(), rows, lost, began, PACKAGES)
    raise typer.Exit(bool(lost))


@app.command()
def processes() -> None:
    """Kill one of two processes, measure when the other stops, and resume with one, two and four."""
    began, rows, lost = time.perf_counter(), [], 0
    with TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(dump_config(tiny_config(**CURVE)))
        whole = Path(folder) / "whole"
        resumed(config, whole)
        change = 1 + next(
            number
            for number, line in enumerate(beside(whole, "-changes.log").read_text().splitlines())
            if "epoch-00001-step-0000003.incomplete/.state.safetensors" in line
        )
        for victim, moment in itertools.product((0, 1), ("during a step", "during a save")):
            waits, messages = [], Counter[str]()
            for trial, then in enumerate((1, 2, 4)):
                out = Path(folder) / f"{victim}{moment.split()[-1]}{trial}"
                if victim == 0:
                    later = 0.0 if moment == "during a save" else 0.05  # steps follow a save
                    started = start(
                        config, out, Kill(signal.SIGKILL, change + 9 * bool(later), later), 2
                    )
                else:  # it changes no files: watch those of the other
                    started = start(config, out, None, 2)
                    pattern = "checkpoints/epoch-00001-step-0000003"
                    pattern = (
                        pattern.replace("epoch-", ".epoch-") + ".incomplete"
                        if "save" in moment
                        else pattern
                    )
                    while not (out / pattern).exists() and all(
                        process.is_alive() for process in started
                    ):
                        time.sleep(0.0005)
                    started[1].kill()
                started[victim].join()
                begin = time.perf_counter()
                codes = finish(started, GRACE)
                waits.append(time.perf_counter() - begin)
                said_so = "another process of the run has ended" in said(out)
                messages["with a message" if said_so else f"exit codes {codes}"] += 1
                resumed(config, out, then)
                curve = max(
                    abs(one["loss"] / two["loss"] - 1)
                    for one, two in zip(history(out), history(whole), strict=True)
                )
                ok = said_so and codes[1 - victim] == 1 and curve < 1e-4
                lost += not ok
                print(
                    f"{victim} {moment}: {codes} {waits[-1]:.2f} s, {said_so}, then {then}: {curve:.1e}",
                    flush=True,
                )
            outcome = f"the other stopped within {max(waits):.2f} s {', '.join(messages)}; resumed with 1, 2 and 4"
            rows.append(
                (f"SIGKILL of process {victim} {moment}", 3, f"{outcome}, losses equal to 1e-4")
            )
    what = "One of two processes is killed; the other stops, and the run is resumed with one, two and four processes."
    record("processes", what, command(), rows, lost, began, PACKAGES)
    raise typer.Exit(bool(lost))


def history(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def judge(
    config: Path, out: Path, expected: dict[str, Any], names: list[str], before: dict[str, bytes]
) -> str:
    """What `--resume` makes of a damaged folder: survived, an error that names the file, or what was lost."""
    codes = finish(start(config, out, resume=True))
    if codes == [0]:
        lost = differences(out, expected)
        return f"LOST: finished with other {', '.join(lost)}" if lost else "survived: the same bits"
    errors = [
        line for line in said(out).splitlines() if line.startswith(("error: ", "checkpoint: "))
    ]
    if codes != [1] or not any(name in line for name in names for line in errors):
        return f"LOST: exit code {codes}, {said(out)[-500:]}"
    if contents(out) != before:
        return f"LOST: changed {[name for name, content in contents(out).items() if before.get(name) != content]}"
    return "a clear error that names the file, and nothing changed"


def full_disk(config: Path, disk: Path, _: Path, expected: dict[str, Any]) -> Iterator[str]:
    """Start a run on disks of growing size until one is large enough; then give each its space and resume."""
    for kilobytes in range(24, 4000, 16):
        with tmpfs(disk, f"size={kilobytes}k") as remount:
            out = disk / "run"
            beside(out, "-0.log").unlink(missing_ok=True)
            codes = finish(start(config, out))
            if codes == [0]:
                return
            empty = [
                path.name for path in out.rglob("*") if path.is_file() and not path.stat().st_size
            ]
            broken = [str(path) for path in out.glob("checkpoints/epoch-*") if damage(path)]
            named = re.search(
                rf"^error: .*No space left on device: '{disk}/.*run", said(out), re.MULTILINE
            )
            remount("size=64m")
            resumed(config, out)
            lost = [*empty, *broken, *differences(out, expected)] + ["no clear error"] * (
                not named or codes != [1]
            )
            yield (
                f"LOST: {lost}, {said(out)[-500:]}"
                if lost
                else "a clear error; resumed to the same bits once there is space"
            )


def read_only_folder(
    config: Path, disk: Path, stopped: Path, expected: dict[str, Any]
) -> Iterator[str]:
    """Start a run, and resume one, in a folder that turns read-only; then make it writable and resume."""
    for run in (None, stopped):
        with tmpfs(disk, "size=64m") as remount:
            out = disk / "run"
            beside(out, "-0.log").unlink(missing_ok=True)
            if run:
                shutil.copytree(run, out)
            before = contents(disk)
            remount("ro")
            codes = finish(start(config, out, resume=bool(run)))
            named = re.search(
                rf"^error: .*Read-only file system: '{disk}/", said(out), re.MULTILINE
            )
            same = contents(disk) == before
            remount("rw")
            resumed(config, out)
            lost = (
                differences(out, expected)
                + ["no clear error"] * (not named or codes != [1])
                + ["files"] * (not same)
            )
            yield (
                f"LOST: {lost}, {said(out)[-500:]}"
                if lost
                else "a clear error, nothing changed; resumed when writable"
            )


@app.command()
def disk() -> None:
    """Damage every file of stopped and finished runs in turn, fill the disk, and make it read-only."""
    began, outcomes = time.perf_counter(), Counter[tuple[str, str]]()
    with TemporaryDirectory() as folder:
        config, whole, stopped = (
            write_config(Path(folder)),
            Path(folder) / "whole",
            Path(folder) / "stopped",
        )
        resumed(config, whole)
        expected = state_of(whole)
        changes = beside(whole, "-changes.log").read_text().splitlines()
        middle = max(
            n
            for n, line in enumerate(changes)
            if "rename whole/checkpoints/.epoch-00001-step" in line
        )
        finish(start(config, stopped, Kill(signal.SIGKILL, middle + 2)))
        for state, name in ((stopped, "a stopped run"), (whole, "a finished run")):
            for how, files in itertools.product(DAMAGES, sorted(contents(state))):
                out = Path(folder) / "copy"
                shutil.rmtree(out, ignore_errors=True)
                beside(out, "-0.log").unlink(missing_ok=True)
                shutil.copytree(state, out)
                shutil.copytree(beside(whole, "-state"), beside(out, "-state"), dirs_exist_ok=True)
                DAMAGES[how](out / files)
                outcome = judge(config, out, expected, [files], contents(out))
                outcomes[f"{how} file of {name}", outcome] += 1
                if outcome.startswith("LOST"):
                    print(name, how, files, outcome, flush=True)
        for what, trial in (("full disk", full_disk), ("read-only folder", read_only_folder)):
            for outcome in trial(config, Path(folder) / "disk", stopped, expected):
                print(what, outcome, flush=True)
                outcomes[what, outcome] += 1
    rows = [(what, times, outcome) for (what, outcome), times in sorted(outcomes.items())]
    lost = sum(times for _, times, outcome in rows if outcome.startswith("LOST"))
    what = "Each file of a stopped and of a finished run is damaged in turn; the disk is full, or read-only."
    record("disk", what, command(), rows, lost, began, PACKAGES)
    raise typer.Exit(bool(lost))


@app.command()
def numbers() -> None:
    """Train the same config twice in fresh processes: the same bits, in float32 and bfloat16, plain and with Muon."""
    began, rows, lost = time.perf_counter(), [], 0
    bf16 = {**EVERYTHING, "train": {**EVERYTHING["train"], "precision": "bf16"}}
    cases = {
        "everything random, float32": EVERYTHING,
        "everything random, bfloat16": bf16,
        "Muon": MUON,
        "ViT": CURVE,
    }
    with TemporaryDirectory() as folder:
        for (what, sections), processes in itertools.product(cases.items(), (1, 2)):
            if processes == 2:  # batches that two processes can share
                sections = {**sections, "train": {**sections["train"], "batch_size": 240}}
            config = Path(folder) / "run.toml"
            config.write_text(dump_config(tiny_config(**sections)))
            outs = [Path(folder) / f"{len(rows)}{which}" for which in "ab"]
            for out in outs:
                resumed(config, out, processes)
            found = differences(outs[1], state_of(outs[0]))
            lost += bool(found)
            rows.append(
                (
                    f"{what}, {processes} process" + "es" * (processes > 1),
                    2,
                    f"{found or 'the same bits'}",
                )
            )
            print(rows[-1], flush=True)
    what = "The same config and seed twice, in fresh processes: weights, optimizer state, average, history, results."
    record("numbers", what, command(), rows, lost, began, PACKAGES)
    raise typer.Exit(bool(lost))


def parquet_of_noise(folder: Path, images: int) -> None:
    """PNG files of 8x8 random pixels in parquet shards, in the layout of a Hub data set; 3 classes."""
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)}
    )
    pixels, shard = np.random.default_rng(0), 50_000
    folder.mkdir()
    for split, count in (("train", images), ("test", 300)):
        for first in range(0, count, shard):
            encoded = []
            for number in range(first, min(first + shard, count)):
                content = BytesIO()
                image = Image.fromarray(pixels.integers(0, 256, (8, 8, 3), np.uint8))
                image.save(content, format="png", compress_level=1)
                encoded.append({"bytes": content.getvalue(), "path": f"{number}.png"})
            labels = [number % 3 for number in range(first, first + len(encoded))]
            table = pa.table({"img": encoded, "label": labels}).cast(features.arrow_schema)
            pq.write_table(table, folder / f"{split}-{first // shard:05d}.parquet")


def own_memory() -> int:
    """Bytes of this process and its children: what they share counts once, files mapped into memory do not count."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    total = 0
    for pid in ours:
        with suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += 1024 * sum(
                map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB$", rollup, re.MULTILINE))
            )
    return total


@app.command()
def load(
    images: Annotated[int, typer.Option(help="Number of training images.")] = 1_300_000,
) -> None:
    """Train one epoch on images that worker processes decode, and watch memory and throughput."""
    began, memory, over = time.perf_counter(), list[int](), threading.Event()
    with TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        splits.KEPT_BYTES = 0  # images this small would be kept in memory
        parquet_of_noise(Path(folder) / "images", images)
        print(f"{images} images after {time.perf_counter() - began:.0f} s", flush=True)
        data = {"name": str(Path(folder) / "images"), "validation": 0.0}
        config = tiny_config(data=data, train={"epochs": 1, "batch_size": 1000})

        def watch() -> None:
            run = Path(folder) / "run"
            while (
                not over.wait(1.0) and not (run / "history.jsonl").exists()
            ):  # written after the epoch
                if (run / "checkpoints").exists():  # written before it
                    memory.append(own_memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            metrics = train(config, Path(folder) / "run").metrics.measured()
        finally:
            over.set()
            watcher.join()
        source = open_source(config.data)
        input_format = input_format_of(create_model(config.model, 3))
        split = splits.splits_of(source, 0.0, input_format, torch.device("cpu"), ["train"])["train"]
        order = permutation(len(split), ORDER, 0, 0)[: min(len(split), 100_000)].reshape(-1, 1000)
        begin = time.perf_counter()
        seen = sum(len(labels) for _, labels, _ in split.loader_in_order(order))
        alone = seen / (time.perf_counter() - begin)
    warm = memory[len(memory) // 10]
    growth = (max(memory[len(memory) // 10 :]) - warm) / 2**20
    trained = metrics["train"]["images_per_second"]
    outcome = (
        f"memory of all processes {warm / 2**20:.0f} MiB after a tenth of the epoch, then at most "
    )
    outcome += f"{growth:.0f} MiB more (bound {BOUND}); {trained:.0f} images/s, decoding alone {alone:.0f} images/s, "
    outcome += f"{split.workers} workers, on a machine shared with other work"
    lost = int(growth > BOUND)
    what = "One epoch over small images that worker processes decode each time, from a memory-mapped table."
    record(
        "load",
        what,
        command(),
        [(f"{images:,} images of 8x8 pixels", 1, outcome)],
        lost,
        began,
        PACKAGES,
    )
    print(outcome)
    raise typer.Exit(bool(lost))


if __name__ == "__main__":
    app()
