"""Runs that are killed, damaged or out of disk resume to the same bits, or end with an error that says why."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from damage import DAMAGES, tmpfs
from killed_runs import (
    EVERYTHING,
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
from sa_zoo.training.config import dump_config

GRACE = 30.0  # seconds that torchrun gives the other processes when one has failed
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# A run that does not depend on the number of processes, but for rounding.
CURVE: dict[str, dict[str, Any]] = {
    "augment": {"crop_padding": 1, "flip": True},
    "optim": {"name": "sgd", "lr": 0.05},
    "train": {"epochs": 3, "batch_size": 240, "checkpoint_steps": 2},
}


def config_in(folder: Path, sections: dict[str, dict[str, Any]]) -> Path:
    path = folder / "run.toml"
    path.write_text(dump_config(tiny_config(**sections)))
    return path


def stop(processes: list[Any], victim: int, out: Path, files: str) -> list[int]:
    """Kill one process as soon as a run folder has these files; the exit codes."""
    while not any(out.glob(files)) and processes[victim].is_alive():
        time.sleep(0.0005)
    processes[victim].kill()
    return finish(processes, GRACE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Config, and the folders of undisturbed runs of one and two processes."""
    folder = tmp_path_factory.mktemp("killed")
    config = config_in(folder, EVERYTHING)
    outs = {}
    for processes in (1, 2):
        outs[processes] = folder / f"whole{processes}"
        resumed(config, outs[processes], processes)
    return config, outs


def test_kill(proof, whole, tmp_path):
    """Runs of one and two processes are killed and resumed. Weights, optimizer state, history, record of heads and
    results equal those of an undisturbed run bit for bit; no temporary or empty file is left."""
    config, outs = whole
    generator = random.Random(0)
    for trial in range(proof.times or 2):
        processes = 1 + trial % 2
        expected = state_of(outs[processes])
        number = SIGNALS[trial % 3]
        changes = beside(outs[processes], "-changes.log").read_text().splitlines()
        at = generator.randint(1, len(changes))
        out = tmp_path / str(trial) / "run"
        out.parent.mkdir()
        codes = finish(start(config, out, (number, at), processes), GRACE)
        resumed(config, out, processes)
        lost = differences(out, expected) + ["a traceback"] * (70 in codes)
        proof.tried(number.name, "resumed to the same bits", lost)


def test_processes(proof, tmp_path):
    """One of two processes is killed; the other stops with a message, and the run is resumed with one, two and four
    processes to the same losses but for rounding."""
    config = config_in(tmp_path, CURVE)
    whole = tmp_path / "whole"
    resumed(config, whole)
    last = "epoch-00001-step-0000003"
    # steps follow a save
    moments = {"save": f"checkpoints/.{last}.incomplete", "step": f"checkpoints/{last}"}
    cases = list(itertools.product((1, 0), moments, (1, 2, 4)))
    for trial in range(proof.times or 1):
        victim, moment, then = cases[trial % len(cases)]
        out = tmp_path / f"run{trial}"
        codes = stop(start(config, out, processes=2), victim, out, moments[moment])
        message = "error: another process of the run has ended" in said(out)
        resumed(config, out, then)
        losses = zip(history(out), history(whole), strict=True)
        curve = max(abs(one["loss"] / two["loss"] - 1) for one, two in losses)
        lost = codes[1 - victim] != 1 or not message or curve > 1e-4
        kind = f"SIGKILL of process {victim} during a {moment}, resumed with {then}"
        proof.tried(kind, "the other stopped with a message", lost and (codes, curve, said(out)))


def history(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_numbers(proof, tmp_path):
    """The same config and seed twice, in fresh processes: weights, optimizer state, history, results."""
    bf16 = {**EVERYTHING, "train": {**EVERYTHING["train"], "precision": "bf16"}}
    cases = {"Muon": MUON, "bfloat16": bf16, "float32": EVERYTHING, "ViT": CURVE}
    trials = list(itertools.product(cases, (1, 2)))
    for trial in range(proof.times or 1):
        name, processes = trials[trial % len(trials)]
        sections = dict(cases[name])
        if processes == 2:  # batches that two processes can share
            sections["train"] = {**sections["train"], "batch_size": 240}
        config = config_in(tmp_path, sections)
        outs = [tmp_path / f"{trial}{which}" for which in "ab"]
        for out in outs:
            resumed(config, out, processes)
        lost = differences(outs[1], state_of(outs[0]))
        proof.tried(f"{name}, {processes} processes", "the same bits", lost)


@pytest.fixture(scope="module")
def stopped(whole, tmp_path_factory):
    """The folder of a run that was killed in its second epoch."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    stop(start(whole[0], out), 0, out, "checkpoints/epoch-00001-step-0000001")
    return out


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_damage(proof, whole, stopped, tmp_path):
    """Each file of a stopped and of a finished run is damaged in turn. The run resumes to the same bits, or the file is
    named and nothing changes."""
    config, outs = whole
    expected = state_of(outs[1])
    folders = {"a stopped run": stopped, "a finished run": outs[1]}
    cases = [
        (kind, how, name)
        for kind, folder in folders.items()
        for how in DAMAGES
        for name in sorted(contents(folder))
    ]
    random.Random(0).shuffle(cases)
    cases = [("a finished run", "vanished", "metrics.json"), *cases]
    for trial, (kind, how, name) in enumerate(cases[: proof.times or 6]):
        out = tmp_path / str(trial) / "run"
        shutil.copytree(folders[kind], out)
        shutil.copytree(beside(outs[1], "-state"), beside(out, "-state"))
        DAMAGES[how](out / name)
        before = contents(out)
        codes = finish(start(config, out, resume=True))
        if codes == [0]:
            proof.tried(f"{how} file of {kind}", "the same bits", differences(out, expected))
            continue
        errors = re.findall(r"^(?:error|checkpoint): .*", said(out), re.MULTILINE)
        named = any(name in line for line in errors)
        lost = codes != [1] or not named or contents(out) != before
        proof.tried(f"{how} file of {kind}", "named, nothing changed", lost and said(out)[-500:])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk of its own")
def test_disk(proof, whole, stopped, tmp_path):
    """The disk fills up while a run starts, or is read-only when it resumes: an error names the file. With space, the
    run resumes to the same bits."""
    config, outs = whole
    expected = state_of(outs[1])
    kilobytes = sum(map(len, contents(outs[1]).values())) // 1024
    times = proof.times or 2
    for trial in range(times):
        disk = tmp_path / str(trial) / "disk"
        disk.parent.mkdir()
        out = disk / "run"
        size = 24 + (kilobytes - 24) * trial // times
        full = trial % 2 == 0
        with tmpfs(disk, f"size={size}k" if full else "size=64m") as remount:
            if not full:
                shutil.copytree(stopped, out)
                remount("ro")
            before = contents(disk)
            codes = finish(start(config, out, resume=not full))
            reason = f"No space left on device: '{disk}/" if full else f"{out} cannot be written"
            named = re.search(f"^error: .*{reason}", said(out), re.MULTILINE)
            files = out.glob("checkpoints/epoch-*")
            broken = any(map(damage, files)) if full else contents(disk) != before
            remount("rw,size=64m")
            resumed(config, out)
            lost = codes != [1] or not named or broken or differences(out, expected)
            kind = "full disk" if full else "read-only folder"
            proof.tried(kind, "an error, resumed with space", lost and (lost, said(out)[-500:]))
