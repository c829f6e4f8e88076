"""Hostile model folders in processes of their own, and an epoch over many images."""

import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import datasets
import psutil
import pytest
from hostile import FOLDERS
from model_folders import make_run
from tiny_runs import noise_images, parquet_folder, tiny_config

import sa_zoo
from sa_zoo.publishing.transformers_export import transformers_files
from sa_zoo.training import splits
from sa_zoo.training.train import train

GIBIBYTES = 1.0  # that this package may take for a hostile folder, beyond what importing the libraries takes
MEBIBYTES = 64  # that memory may grow after the first tenth of an epoch
LOADERS = {
    "sa_zoo": "from sa_zoo.folders.opened import open_model as load",
    "timm": "import timm; load = lambda folder: timm.create_model(f'local-dir:{folder}', pretrained=True)",
    "transformers": "from transformers import AutoModelForImageClassification as m; load = m.from_pretrained",
}
CODE = """
import os, resource, signal, sys
import torch, timm, transformers, sa_zoo
{loader}
from transformers import AutoModelForImageClassification
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[1:]:
    pid = os.fork()  # the imports are paid once
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30,) * 2)
        signal.alarm(60)
        before = peak()
        try:
            load(folder)
            outcome = "loaded"
        except (ValueError, OSError) as error:
            outcome = "refused"
        except Exception as error:
            outcome = "traceback"
        print("RESULT", outcome, (peak() - before) / 2**20, flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print("RESULT killed 0", flush=True)
"""


def test_input(proof, tmp_path):
    """Hostile model folders (foreign architectures and weights, a billion parameters, NaN, wrong types, nesting,
    damaged and disguised weights), each in a process of its own. This package has to refuse every one with a message,
    without executing code, within 1 GiB and 60 seconds."""
    if not proof.times:
        pytest.skip("--times is a number of folders; tests/test_check.py tries all in one process")
    sizes = {"embed_dim": 13, "depth": 2, "num_heads": 3, "hidden_dim": 11}
    harmless = make_run(tmp_path / "harmless", "sa_quadratic_cifar", **sizes)
    opened = sa_zoo.open(harmless)
    opened.with_files(transformers_files(opened))
    for loader, code in LOADERS.items():
        folders = []
        for number, (change, _) in enumerate(list(FOLDERS.values())[: proof.times]):
            folder = tmp_path / loader / str(number)
            folders.append(shutil.copytree(harmless, folder))
            change(folder)
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(loader=code), *map(str, folders)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path / loader,
            capture_output=True,
            text=True,
        )
        results = re.findall(r"^RESULT (\w+) (\S+)", done.stdout, re.MULTILINE)
        assert len(results) == len(folders), done.stderr[-2000:]
        executed = bool(list(tmp_path.rglob("executed")))
        for name, (outcome, memory) in zip(FOLDERS, results, strict=False):
            kept = outcome == "refused" and float(memory) <= GIBIBYTES and not executed
            lost = loader == "sa_zoo" and not kept
            proof.tried(f"loaded by {loader}", outcome, lost and (name, outcome, memory))


def own_memory() -> int:
    """Bytes of this process and its children: what they share counts once, files mapped into memory do not count."""
    process = psutil.Process()
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(OSError):  # it has ended
            rollup = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
            total += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB$", rollup, re.M)))
    return 1024 * total


def test_load(proof, tmp_path, monkeypatch):
    """One epoch over small images that worker processes decode each time, from a memory-mapped table: memory grows by
    at most 64 MiB after a tenth of it."""
    if (proof.times or 0) < 100:  # a shorter epoch is over before memory is level
        pytest.skip("--times is a number of thousands of images, at least 100")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(splits, "KEPT_BYTES", 0)  # images this small would be kept in memory
    pictures = {"train": noise_images(1000) * proof.times, "test": noise_images(300)}
    data = {"name": str(parquet_folder(tmp_path / "images", pictures)), "validation": 0.0}
    config = tiny_config(data=data, train={"epochs": 1, "batch_size": 1000})
    memory: list[int] = []
    over = threading.Event()
    run = tmp_path / "run"

    def watch() -> None:
        while not over.wait(1.0) and not (run / "history.jsonl").exists():  # it follows the epoch
            if (run / "checkpoints").exists():  # written before it
                memory.append(own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        train(config, run)
    finally:
        over.set()
        watcher.join()
    warm = len(memory) // 10
    growth = (max(memory[warm:]) - memory[warm]) / 2**20
    proof.tried("thousands of images", "bounded", growth > MEBIBYTES and growth, proof.times)
